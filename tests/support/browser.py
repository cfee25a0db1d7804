"""Chromium without a window, driven through a pipe by its DevTools protocol.

It has a fresh profile and asks nobody for anything: no updates, no sync, no QUIC.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
)

Message = dict[str, Any]


def require_browser() -> str:
    """Return the path of Chromium; skip the running test without one."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    return path


class Tab:
    """A tab of a browser: its page, what it logged, and what it requested."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, answers: int) -> None:
        self._process, self._to, self._answers = process, to, answers
        self._rest = b""
        self._number = 0
        self._events: list[Message] = []
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Message:
        """Call a method of the protocol in this tab, and return its result."""
        return self._send(method, parameters, self._session)

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Open a file in a window of so many pixels, and wait until it is loaded."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())

    def value(self, script: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def point_at(self, selector: str, across: float, down: float) -> None:
        """Move the pointer to a place in an element, by shares of its width and height."""
        left, top, right, bottom = self.area(selector)
        place = {"x": left + across * (right - left), "y": top + down * (bottom - top)}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)

    def area(self, selector: str) -> tuple[float, float, float, float]:
        """Bring an element to the middle of the window, and return its edges there.

        They are left, top, right and bottom, in pixels.
        """
        element = f"document.querySelector('{selector}')"
        self.value(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = f"{element}.getBoundingClientRect()"
        left, top, right, bottom = self.value(f"(b => [b.left, b.top, b.right, b.bottom])({box})")
        return left, top, right, bottom

    def press(self, key: str) -> None:
        """Press a key, as `ArrowRight`."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def wait_for(self, script: str) -> Any:
        """Return the value of an expression as soon as it is true; fail after five seconds."""
        loop = (
            "new Promise((done, fail) => { const start = Date.now(); const look = () => {"
            f"const value = {script}; if (value) done(value);"
            "else if (Date.now() - start > 5000) fail(new Error('it did not come'));"
            "else setTimeout(look, 10) }; look() })"
        )
        return self.value(loop)

    def picture(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def printed(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    @property
    def requests(self) -> list[str]:
        """The addresses that the page requested since it was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    @property
    def complaints(self) -> list[Message]:
        """Errors and warnings since the page was opened: of scripts, and of the browser."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self._events if event["method"] in kinds]

    def _send(self, method: str, parameters: Message, session: str | None = None) -> Message:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: Message = answer["result"]
        return result

    def _read(self) -> Message:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 16)
            assert data, f"the browser ended: {self._process.poll()}"
            self._rest += data
        text, self._rest = self._rest.split(b"\0", 1)
        message: Message = json.loads(text)
        return message


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Run Chromium with a fresh profile in a folder; it ends with the block."""
    path = require_browser()
    theirs, to = os.pipe()
    answers, their_answers = os.pipe()
    command = [path, *_OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]

    def hand_over() -> None:
        os.dup2(theirs, 103)
        os.dup2(their_answers, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    silence = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdout=silence, stderr=silence, preexec_fn=hand_over, pass_fds=(3, 4)
    )
    os.close(theirs)
    os.close(their_answers)
    try:
        yield Tab(process, to, answers)
    finally:
        os.close(to)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
