"""Chromium without a window, told what to do over a pipe (the DevTools protocol), for tests of the report's page."""

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
MISSING = f"no browser: these tests need one of {', '.join(NAMES)} in PATH; on Debian: apt-get install -y chromium"
SIZE = (1200, 900)


class Browser:
    """One page in a browser that can reach no network; ``requests`` and ``complaints`` are of the page now open."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._rest = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        assert program is not None, MISSING
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # the protocol's pipes are file descriptors 3 and 4
        flags = (
            "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        )
        refused = "--proxy-server=127.0.0.1:9 --disable-background-networking --no-first-run"
        command = f'exec "$0" {flags} {refused} --user-data-dir="$1" about:blank 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, self._profile.name],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
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
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(
        self, file: Path, *, dark: bool = False, media: str = "screen", size: tuple[int, int] = SIZE
    ) -> None:
        """Load a file and wait until it is there; what it asks for and complains of is gathered from here on."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=False,
        )
        self.requests, self.complaints = [], []
        self._call("Page.navigate", url=file.resolve().as_uri())
        self._until("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return what an expression evaluates to, awaited if it is a promise; an exception fails the test."""
        told = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def picture(self, target: Path, *, whole: bool = False) -> None:
        """Write what the window shows, or the whole page, in the format that the file's name ends with."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        more: dict[str, Any] = (
            {"clip": {**size, "scale": 1}, "captureBeyondViewport": True} if whole else {}
        )
        told = self._call("Page.captureScreenshot", format=target.suffix[1:], **more)
        target.write_bytes(base64.b64decode(told["data"]))

    def press(self, key: str, code: int, text: str = "") -> None:
        both = {"key": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **both)
        self._call("Input.dispatchKeyEvent", type="keyUp", **both)

    def save_downloads(self, folder: Path) -> None:
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._out, rest) :]
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                result: dict[str, Any] = told["result"]
                return result

    def _until(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            content = os.read(self._in, 1 << 16)
            assert content, "the browser has ended"
            self._rest += content
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        self._note(told.get("method", ""), told.get("params", {}))
        return told

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["exception"]["description"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "warning",
            "error",
            "assert",
        ):
            self.complaints.append(str(params["args"]))
