"""A headless Chromium driven over its own debugging pipe (the DevTools protocol), with the standard library alone.

with Browser() as browser:
    page = browser.open(path, width=375)
    page.evaluate("document.title")
    page.click("thead button")
    page.requests, page.errors
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser's command; SPARSITY_LAB_BROWSER names another."""
    return os.environ.get("SPARSITY_LAB_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running browser with a profile of its own, gone when the block ends."""

    def __enter__(self) -> Browser:
        command = find()
        if command is None:
            raise FileNotFoundError(f"no browser: none of {', '.join(NAMES)}")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._in, write_there = os.pipe()
        read_there, self._out = os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (read_there, write_there)]

        def place() -> None:  # the browser reads commands at descriptor 3 and writes answers at 4
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [command, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (read_there, write_there, *theirs):
            os.close(fd)
        self._buffer, self._number = b"", 0
        self._events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, /, timeout: float = 30, **params: Any) -> dict[str, Any]:
        """One command and its answer; what happens meanwhile is kept for `events`."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages(timeout):
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)
        raise TimeoutError(f"{method}: no answer within {timeout} s")

    def wait_for(self, method: str, session: str, timeout: float = 30) -> None:
        """Until an event has happened."""
        if any(e.get("method") == method and e.get("sessionId") == session for e in self._events):
            return
        for event in self._messages(timeout):
            self._events.append(event)
            if event.get("method") == method and event.get("sessionId") == session:
                return
        raise TimeoutError(f"{method}: not within {timeout} s")

    def events(self, session: str) -> list[dict[str, Any]]:
        """What a page did so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    def _messages(self, timeout: float) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            while b"\0" in self._buffer:
                message, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(message)
            if select.select([self._in], [], [], min(left, 1))[0]:
                chunk = os.read(self._in, 1 << 20)
                if not chunk:
                    raise OSError("the browser is gone")
                self._buffer += chunk

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        """A page at a window's size, loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def click(self, selector: str, index: int = 0) -> None:
        """A real press of the mouse in the middle of an element."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center', inline: 'center'}})")
        box = self.evaluate(f"(({element}).getBoundingClientRect()).toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def press(self, name: str, text: str = "") -> None:
        """A key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, text=text if kind == "keyDown" else "")

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, but those that are inside it."""
        events = self._browser.events(self._session)
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    @property
    def errors(self) -> list[str]:
        """Exceptions, console errors and warnings, and what the browser complains about (policy, loading ...)."""
        self.evaluate("0")  # what was said before has arrived when this has its answer
        told = []
        for event in self._browser.events(self._session):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                told.append(params["exceptionDetails"]["text"])
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                told.append(str(params["args"]))
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                told.append(params["entry"]["text"])
        return told

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self, path: Path) -> None:
        """As it prints."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"]))
