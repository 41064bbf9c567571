"""How does a test look at a page? Headless Chromium, told what to do over two pipes: no package is needed for that."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page of Chromium, from `with` to its end. It reads what it is told from its descriptor 3 and answers on 4."""

    def __init__(self, url: str) -> None:
        self.url, self._numbers, self._session = url, itertools.count(1), None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def __enter__(self) -> Browser:
        to, self._to = os.pipe()
        self._from, back = os.pipe()
        # Both are moved out of the way of 3 and 4 first; bash hands them on.
        words = ["bash", "-c", f'exec "$@" 3<&{to} 4>&{back}', "bash", CHROMIUM, "--headless", "--no-sandbox",
                 "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--window-size=900,600",
                 f"--user-data-dir={self._folder.name}", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(words, pass_fds=(to, back), stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)
        os.close(to)
        os.close(back)
        self._read = os.fdopen(self._from, "rb", buffering=0)
        self._held = b""
        target = self.tell("Target.createTarget", url=self.url)["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.until(f"location.href === {self.url!r} && document.readyState === 'complete'")
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        self._read.close()
        os.close(self._to)
        self._folder.cleanup()

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of its protocol, and what it answers."""
        number = next(self._numbers)
        said = {"id": number, "method": method, "params": params}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._to, json.dumps(said).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                part = self._read.read(1 << 16)
                assert part, "the browser has ended"
                self._held += part
            line, self._held = self._held.split(b"\0", 1)
            if (found := json.loads(line)).get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def run(self, script: str) -> Any:
        """What a script says, in the page."""
        found = self.tell("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> None:
        """Wait until it says true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"not true within {seconds} seconds: {script}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Of what is to be seen, as PNG."""
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))
