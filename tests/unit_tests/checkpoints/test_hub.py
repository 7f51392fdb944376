"""Models by their id on the Hugging Face Hub, from a hub of this machine: an HTTP server that
answers what `huggingface_hub` asks.

Break one of these, and a test fails:

- `hub_folder`: leave out the first try, in the cache
- `LEFT_OUT`: no pattern
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from megatron_async.checkpoints import CheckpointError, open_model
from megatron_async.checkpoints.model_names import is_hub_id
from tests.support.ranks import free_port

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "nobody/tiny"


class Hub(ThreadingHTTPServer):
    """One repository; `asked` are the paths of all requests."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = files
        self.asked: list[str] = []
        self.status = 200


class Answers(BaseHTTPRequestHandler):
    """What of the hub's interface `snapshot_download` uses."""

    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        api, resolve = f"/api/models/{REPO}", f"/{REPO}/resolve/{COMMIT}/"
        if self.server.status != 200 or REPO not in self.path:
            self._say(b"{}", self.server.status if self.server.status != 200 else 404)
        elif self.path.startswith((f"{api}/revision/", api)) and "/tree/" not in self.path:
            names = [{"rfilename": name} for name in self.server.files]
            self._say(json.dumps({"id": REPO, "sha": COMMIT, "siblings": names}).encode())
        elif "/tree/" in self.path:
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.server.files.items()
            ]
            self._say(json.dumps(found).encode())
        else:
            self._say(self.server.files[self.path.removeprefix(resolve)])

    do_HEAD = do_GET

    def _say(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        if status == 403:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def ask(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let `huggingface_hub` ask there, as HF_ENDPOINT does when it is set before the import."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    files = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)


@pytest.fixture
def hub(family_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder: Path = family_folder("qwen2")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    files["original/consolidated.00.safetensors"] = b"another format"
    files["pytorch_model.bin"] = b"another one"
    files["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    ask(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_is_fetched_once_and_then_found_in_the_cache(hub: Hub) -> None:
    source = open_model(REPO)
    assert source.architecture.num_layers > 0
    assert not any(name.endswith((".bin", "00.safetensors")) for name in hub.asked)
    assert any(name.endswith("additional_chat_templates/tool_use.jinja") for name in hub.asked)
    hub.asked.clear()
    again = open_model(REPO)
    assert again.architecture == source.architecture
    assert hub.asked == []


def test_a_copy_without_all_weights_is_fetched_anew(hub: Hub) -> None:
    source: Any = open_model(REPO)
    (weights,) = source.folder.glob("*.safetensors")
    weights.unlink()
    hub.asked.clear()
    assert open_model(REPO).architecture == source.architecture
    assert hub.asked


def test_no_such_repository(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="knows no such repository"):
        open_model("nobody/else")


def test_terms_that_must_be_accepted(hub: Hub) -> None:
    hub.status = 403
    with pytest.raises(CheckpointError, match=r"terms must be accepted at http.*hf auth login"):
        open_model(REPO)


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_the_command_is_told(hub: Hub, monkeypatch, offline: bool):
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        ask(monkeypatch, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CheckpointError) as error:
        open_model(f"{REPO}@v1")
    assert "`hf download nobody/tiny --revision v1 --local-dir ./tiny` fetches it" in str(
        error.value
    )
    if offline:
        assert hub.asked == []


def test_what_an_id_looks_like() -> None:
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert is_hub_id("Qwen/Qwen3-0.6B@main")
    for name in ("smollm2", "./a/b", "/a/b", "a/b/c", "../a", "~/a", "a/b/", "dummy:tiny", "a b/c"):
        assert not is_hub_id(name), name
