"""Where new weights may come from: no path, link or address leads elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.serving.weight_sources import check_trainer, folder_below, name_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of weights beside another one."""
    for name in ("weights/step_1/inner", "secret"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "weights"


def test_a_folder_below_is_found_by_name_and_by_path(root: Path) -> None:
    for given in ("step_1", "./step_1", str(root / "step_1")):
        assert folder_below(str(root), given) == root / "step_1"
    (root / "latest").symlink_to("step_1")  # a link that stays inside is the owner's choice
    assert folder_below(str(root), "latest") == root / "step_1"


@pytest.mark.parametrize(
    "given",
    ["../secret", "step_1/../../x", "/etc", "", "..", "a\0b", "C:\\x", "~/x", "no", "out", "o"],
)
def test_no_other_folder_is(root: Path, given: str) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    (root / "o").symlink_to("o")
    with pytest.raises(ValueError, match=r"--weights-dir|null byte"):
        folder_below(str(root), given)
    with pytest.raises(ValueError, match="start the service with --weights-dir"):
        name_below(None, given)


def test_no_file_of_it_is_a_link_that_leads_out(root: Path) -> None:
    (root / "step_1" / "o").symlink_to("o")
    (root / "step_1" / "inner" / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"model\.safetensors.*leads out"):
        folder_below(str(root), "step_1")


def test_a_trainer_is_one_that_was_named() -> None:
    check_trainer("10.0.0.5", 29500, ["10.0.0.5"])
    check_trainer("head", 29500, ["10.0.0.5", "head:29500"])
    for host, port in (("head", 29501), ("10.0.0.50", 29500), ("0.0.0.0", 29500), ("head", 0)):
        with pytest.raises(ValueError, match=r"--trainer|no port"):
            check_trainer(host, port, ["10.0.0.5", "head:29500"])
