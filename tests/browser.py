"""A headless Chromium, driven over the pipe of its DevTools protocol: opens a page, clicks, and collects its errors."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_DEADLINE_SECONDS = 120  # for a machine that has much else to do


class Browser:
    """One tab; `errors` are the console's errors and the page's uncaught exceptions so far."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 800) -> None:
        self.errors: list[str] = []
        self._next = 0
        self._unread = b""
        self._events: list[dict[str, Any]] = []
        commands_out, self._commands = os.pipe()
        self._answers, answers_in = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        command = [*options, f"--window-size={width},{height}", f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        redirect = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "chromium", str(CHROMIUM), *command],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)  # Chromium ends when its commands do
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def open(self, url: str) -> None:
        """Loads a page; returns when it has loaded."""
        self._events.clear()
        self._ask("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Clicks in the middle of the first element that the selector finds, as a mouse does."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def double_click(self, selector: str) -> None:
        """Clicks twice in the middle of an element."""
        x, y = self._middle(selector)
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)

    def turn_wheel(self, selector: str, by: int) -> None:
        """Turns the mouse wheel over an element."""
        x, y = self._middle(selector)
        self._ask("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def screenshot(self) -> bytes:
        """What the window shows, as a PNG file."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _middle(self, selector: str) -> tuple[float, float]:
        place = self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height / 2] }})(document.querySelector({json.dumps(selector)}))"
        )
        return place[0], place[1]

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            received = os.read(self._answers, 1 << 16) if ready else b""
            assert received, "Chromium does not answer"
            self._unread += received
        raw, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method is not None:
            self._events.append(message)
        is_error = (
            method == "Runtime.exceptionThrown"
            or (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"))
            or (method == "Log.entryAdded" and parameters["entry"]["level"] == "error")
        )
        if is_error:
            self.errors.append(json.dumps(parameters))
