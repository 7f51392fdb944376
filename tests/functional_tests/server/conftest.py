"""The demo model, served."""

from collections.abc import Iterator

import pytest

from tests.support.served import Served


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with Served(
        log, "smollm2", "--device", "cpu", "--block-size-tokens", "16", "--max-requests", "8",
        "--no-progress", "--api-processes", "1", "--quantization", "none",
    ) as served:  # fmt: skip
        served.wait_until_ready()
        yield served
