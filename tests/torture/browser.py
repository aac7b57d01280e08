"""A headless Chromium, driven over its own pipe: what a page looks like to who opens it.

The DevTools protocol is lines of JSON, ended by a zero byte, on two file descriptors; a library that drives
browsers would bring a browser of its own along, and we need ten commands.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

#: What the browser's packages call it, on the systems that we know.
NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: So many seconds without a word are too many.
PATIENCE: Final = 60
#: The browser reads commands from descriptor 3 and writes to 4, which Popen cannot arrange.
_LAUNCHER: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_OPTIONS: Final = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


class BrowserError(Exception):
    """The browser refused a command, or a script of ours raised an exception in it."""


def find_browser() -> str | None:
    """Return the path of a Chromium on PATH, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one tab; a context manager.

    Attributes:
        events: what the tab has told without being asked, since the last `open`: (method, parameters).
    """

    def __init__(self, program: str, profile: Path) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._number = 0
        self._unread = b""
        self._session = ""
        commands, self._commands = _high_pipe()
        self._answers, answers = _high_pipe()
        options = [*_OPTIONS, f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium refuses to run as root otherwise
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, str(commands), str(answers), program, *options, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)

    def __enter__(self) -> Self:
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Show a page in a window of some size, and wait until it is there."""
        self.events.clear()
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=page.as_uri())
        while "Page.loadEventFired" not in (method for method, _ in self.events):
            self._next()

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        text = {"text": key} if len(key) == 1 else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def without_scripts(self, *, disabled: bool) -> None:
        """Switch scripts off or on, for pages opened from now on; `run` works all the same."""
        self._ask("Emulation.setScriptExecutionDisabled", value=disabled)

    def requests(self) -> list[str]:
        """Return what has been asked for since the page was opened."""
        return [
            parameters["request"]["url"]
            for method, parameters in self.events
            if method == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[dict[str, Any]]:
        """Return what the console shows: exceptions, errors, what a policy has blocked."""
        kinds = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        return [parameters for method, parameters in self.events if method in kinds]

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        """Read a message, and note it if it is an event."""
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], PATIENCE)[0]:
                raise BrowserError(f"the browser has said nothing for {PATIENCE} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise BrowserError("the browser has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message


def _high_pipe() -> tuple[int, int]:
    """Make a pipe whose ends the launcher cannot overwrite before it has copied both."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
