"""A headless Chromium driven through chromedriver's own protocol, with nothing but the standard library."""

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-dev-shm-usage",
]  # fmt: skip
PATIENCE_SECONDS = 60

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="no chromium and chromedriver here (Debian: chromium chromium-driver)"
)


class Browser:
    """`with Browser() as browser: browser.open(path)`"""

    def __enter__(self) -> "Browser":
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        assert CHROMEDRIVER
        # Port 0: chromedriver takes a free one and says which.
        self.driver = subprocess.Popen(
            [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.driver.stdout
        for line in self.driver.stdout:
            if "started successfully on port" in line:
                self.root = f"http://127.0.0.1:{line.split('port')[-1].strip(' .' + chr(10))}"
                break
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={self.profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._call("DELETE", self.session, None)
        finally:
            self.driver.terminate()
            self.driver.wait(PATIENCE_SECONDS)
            shutil.rmtree(self.profile, ignore_errors=True)

    def _call(self, verb: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"}, method=verb)
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_SECONDS) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._call("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, theme: str) -> None:
        """The size of the window, and what the reader prefers."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def open(self, path: Path) -> None:
        self._call("POST", f"{self.session}/url", {"url": path.resolve().as_uri()})
        limit = time.monotonic() + PATIENCE_SECONDS
        while self.run("return document.documentElement.dataset.ready") != "true":
            if time.monotonic() > limit:
                said = [entry.get("message") for entry in self.console()]
                raise TimeoutError(f"{path} was not ready after {PATIENCE_SECONDS} s; its console says {said}")
            time.sleep(0.05)

    def wait(self, script: str, *arguments: Any) -> None:
        """Until the script says true."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while self.run(script, *arguments) is not True:
            if time.monotonic() > limit:
                raise TimeoutError(f"not true after {PATIENCE_SECONDS} s: {script}")
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def console(self) -> list[dict[str, Any]]:
        """Whatever the page complained about since the last call."""
        return self._call("POST", f"{self.session}/se/log", {"type": "browser"})
