"""Does what the unit of deploy/ starts serve with what systemd gives it, a key as a credential and a folder for costs?

systemd itself is not asked: its environment is made by hand, without a home and without the variables of a login. The
folder of a model of one's own is the demo target here, and the port a free one.
"""

from __future__ import annotations

import configparser
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the packages of the extra serve are not installed")

from servers import TARGET

ROOT = Path(__file__).parents[2]


def started(unit: configparser.SectionProxy, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of ExecStart, as systemd makes them; folder: where its folders are."""
    name, _ = unit["LoadCredential"].split(":")
    (folder / "credentials").mkdir()
    (folder / "credentials" / name).write_text("secret\n")
    (folder / unit["CacheDirectory"]).mkdir()
    given = {"PATH": os.environ["PATH"], "CREDENTIALS_DIRECTORY": str(folder / "credentials")}
    given |= dict(pair.split("=") for pair in unit["Environment"].split())
    cache = Path(given["MLSPEC_CACHE"])
    assert cache == Path("/var/cache") / unit["CacheDirectory"]  # what CacheDirectory makes
    given |= {"MLSPEC_CACHE": str(folder / cache.name), "PYTHONPATH": str(ROOT)}
    _, *words = unit["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", given["CREDENTIALS_DIRECTORY"]).split()
    words = [TARGET if word.endswith("/TARGET") else word for word in words]
    return [sys.executable, "-m", "mlspec_cli", *words, "--port", "0"], given


def answer(port: int, path: str, body: dict | None = None, key: str | None = None) -> tuple[int, str]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=100) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
def test_the_unit_s_command_serves_asks_for_the_key_and_ends_by_sigterm(tmp_path):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string((ROOT / "deploy" / "mlspec.service").read_text())
    words, environment = started(unit["Service"], tmp_path)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd="/")
    try:
        port = next(int(line.rsplit(":", 1)[1]) for line in process.stderr if line.startswith("mlspec serve: "))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        body = {"prompt": "def f():", "max_tokens": 4}
        assert answer(port, "/health")[0] == 200
        assert answer(port, "/v1/completions", body)[0] == 401
        status, text = answer(port, "/v1/completions", body, "secret")
        assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(int(unit["Service"]["TimeoutStopSec"])) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
