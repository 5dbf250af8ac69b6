"""Chromium without a window, controlled over a pipe by the DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--proxy-server=127.0.0.1:9",
    "--disable-background-networking",
    "--no-first-run",
]
SIZE = (1200, 900)


class Browser:
    """One page in a browser without a network; `requests` and `complaints` are of that page."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._message_id = 0
        self._buffer = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        programs = [path for path in map(shutil.which, NAMES) if path]
        assert programs, (
            f"install a browser, one of {', '.join(NAMES)}: apt-get install chromium"
        )
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        browser_input, self._to_browser = os.pipe()
        self._from_browser, browser_output = os.pipe()
        # The protocol reads file descriptor 3 and writes 4.
        script = f'exec "$@" about:blank 3<&{browser_input} 4>&{browser_output}'
        profile = f"--user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", programs[0], *FLAGS, profile],
            pass_fds=(browser_input, browser_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_input)
        os.close(browser_output)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._from_browser)
        os.close(self._to_browser)
        self._profile.cleanup()

    def open(
        self,
        file: Path,
        *,
        dark: bool = False,
        media: str = "screen",
        size: tuple[int, int] = SIZE,
    ) -> None:
        """Load a file, wait for its load event and start new lists of requests and complaints."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self.requests = []
        self.complaints = []
        self._call("Page.navigate", url=file.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited, an exception fails the test."""
        reply = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def picture(self, target: Path, *, whole: bool = False) -> None:
        """Write the window, or the whole page, in the image format of the file's suffix."""
        options: dict[str, Any] = {"format": target.suffix[1:]}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            options |= {"clip": {**size, "scale": 1}, "captureBeyondViewport": True}
        reply = self._call("Page.captureScreenshot", **options)
        target.write_bytes(base64.b64decode(reply["data"]))

    def press(self, key: str, code: int, text: str = "") -> None:
        event = {"key": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._message_id += 1
        message: dict[str, Any] = {"id": self._message_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._to_browser, content) :]
        while True:
            reply = self._receive()
            if reply.get("id") == self._message_id:
                assert "error" not in reply, (method, reply["error"])
                result: dict[str, Any] = reply["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            content = os.read(self._from_browser, 1 << 16)
            assert content, "the browser has ended"
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note_event(message.get("method", ""), message.get("params", {}))
        return message

    def _note_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["exception"]["description"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error"):
            self.complaints.append(str(params["args"]))
