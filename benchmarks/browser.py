"""Headless Chromium by the DevTools protocol, over a pipe: what looks at pages in tests and benchmarks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}


def found() -> str | None:
    """The path of a Chromium, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser. problems: errors and warnings of its scripts. asked: addresses that it asked for."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", buffering=0), os.fdopen(back, "rb")
        self._count = 0
        self._session: str | None = None
        self._rest = b""
        self.problems: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Let go of the pipe."""
        self._to.close()
        self._back.close()

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._back.fileno(), 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        one, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(one)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = given["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.problems.append(given["entry"]["text"])
            case "Network.requestWillBeSent":
                self.asked.append(given["request"]["url"])

    def open(self, url: str, *, seconds: float = 30.0) -> float:
        """Load a report; the seconds until it is drawn."""
        begun = time.monotonic()
        self.call("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.ready === '1' && location.href !== 'about:blank'", seconds)
        return time.monotonic() - begun

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; a promise's, if it is one."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 10.0) -> None:
        """Wait until an expression is true. TimeoutError if it does not become so."""
        end = time.monotonic() + seconds
        while not self.run(expression):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """The window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if is_phone else 1, mobile=is_phone,
        )  # fmt: skip

    def media(self, **features: str) -> None:
        """Media features, as prefers_color_scheme="dark"."""
        found = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=found)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        code = KEYS.get(key, ord(key[0]))
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move ("mouseMoved"), press, release or turn the wheel at a point of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Click at a point of the window."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def box(self, selector: str) -> dict[str, float]:
        """Where an element is in the window, scrolled into view."""
        found: dict[str, float] = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const b = e.getBoundingClientRect(); return {x: b.x, y: b.y, width: b.width, height: b.height}; })()"
        )
        return found

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """The printed page."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))


@contextmanager
def browser(*options: str) -> Iterator[Page]:
    """A page of a fresh headless browser. RuntimeError if there is no Chromium."""
    path = found()
    if path is None:
        raise RuntimeError("no Chromium on this machine: install Debian's package chromium")
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 f"--user-data-dir={profile}", "--remote-debugging-pipe", *options]  # fmt: skip
        # Chromium reads from descriptor 3 and writes to 4. Not `sh`: dash has one digit for a descriptor.
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{back_write}'
        process = subprocess.Popen(
            ["bash", "-c", shell, path, *words],
            pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(back_write)
        page = None
        try:
            page = Page(to, back)
            yield page
        finally:
            if page is not None:
                page.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
