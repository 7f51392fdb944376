"""A headless Chromium for tests, told what to do by its own protocol over a pipe.

The protocol (Chrome DevTools, `--remote-debugging-pipe`): JSON objects that end with a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The program, by $CHROMIUM or its usual names; None: there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a Chromium of its own, with a profile in `folder`; use it with `with`.
    `complaints` are errors that the page has logged, violations of its policy included."""

    def __init__(self, program: str, folder: Path) -> None:
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        command = f'exec "$@" 3<&{reads} 4>&{writes}'
        arguments = (
            program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder}",
            "--remote-debugging-pipe", "about:blank",
        )  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments], pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._reads)
        os.close(self._writes)

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def open(self, url: str) -> None:
        self.tell("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, script: str) -> Any:
        """What a script's last expression gives, as JSON values."""
        found = self.tell("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = PATIENCE_S) -> Any:
        """Wait until a script gives something true; that."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, f"{script}: not within {timeout_s} s"
            time.sleep(0.05)
        return found

    def write(self, text: str) -> None:
        """Type a text, and the Enter key."""
        self.tell("Input.insertText", text=text)
        self.press("Enter", "\r", 13)

    def press(self, key: str, text: str = "", code: int = 0) -> None:
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        self.tell("Input.dispatchKeyEvent", type="keyDown", **names)
        self.tell("Input.dispatchKeyEvent", type="keyUp", **names)

    def point_at(self, selector: str) -> None:
        """Move the pointer into the middle of an element."""
        x, y = self.value(
            f"(() => {{ const box = document.querySelector({selector!r}).getClientRects()[0];"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """Save what is seen, as PNG."""
        data = self.tell("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._reads], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            data = os.read(self._reads, 1 << 20)
            assert data, "Chromium has ended"
            self._held += data
        message, self._held = self._held.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
