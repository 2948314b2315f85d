"""Debian's chromium, headless, driven over a pipe by the DevTools protocol: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOW_TO_GET_IT = "needs a browser: apt-get install chromium"


class Page:
    """One page of one browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def open(self, url: str, width: int = 1240, height: int = 1000) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)

    def prefer_dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is on the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 120.0) -> Any:
        """The expression's value once it is true."""
        ends = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < ends, (
                f"still not so: {expression}; status: {self.value('document.body.innerText')}"
            )
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "ArrowRight": 39}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, top: str = "0", bottom: str = "innerHeight") -> None:
        """Write what is seen between two expressions of the page, in pixels from its upper edge."""
        first, width, last = self.value(f"[Math.floor({top}), innerWidth, Math.ceil({bottom})]")
        clip = {"x": 0, "y": first, "width": width, "height": last - first, "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", clip=clip)["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of the protocol returns."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._receive())
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _receive(self) -> bytes:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], 120)
            assert ready, "chromium does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "chromium has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return message


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with an empty page."""
    assert EXECUTABLE is not None
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()

    # The protocol's ends are 3 and 4 in the browser.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        flags = (
            *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
        )
        browser = subprocess.Popen(
            ["/bin/bash", "-c", shell, EXECUTABLE, *flags],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(our_out, our_in)
        finally:
            os.close(our_out)
            os.close(our_in)
            browser.terminate()
            browser.wait(60)
