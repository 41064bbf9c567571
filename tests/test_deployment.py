"""Do the files of deploy/ say what Docker, Compose and systemd understand, and start a command that there is?

No daemon is asked: the files are parsed, their commands are read by the command line's own parser, and the shell and
the Python in them by theirs. Where systemd or Compose are installed, they read their file, too. An image is not built;
tests/serving/test_unit_command.py starts what the unit starts.
"""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from mlspec_cli.start import _read

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TARGET = str(ROOT / "hf_mlspec" / "demo_pair" / "target")
WORDS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}


def steps(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile in order: its word, and the rest of the line, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [tuple(line.strip().split(None, 1)) for line in joined.splitlines() if line.strip()]
    assert all(len(one) == 2 and one[0] in WORDS for one in found), found
    return found


@pytest.fixture(scope="module")
def image():
    return steps((DEPLOY / "Dockerfile").read_text())


def read(words: list[str]):
    """The words as `mlspec` reads them. A model's folder in these files is one to be replaced: here the demo's."""
    return _read([TARGET if word.endswith("/TARGET") else word for word in words])


def of(image, word: str) -> list[str]:
    return [rest for name, rest in image if name == word]


@pytest.mark.parametrize("text", ["RUN", "COPPY . .", "FROM a\nruns b"])
def test_what_is_no_dockerfile_is_not_taken_for_one(text):
    with pytest.raises(AssertionError):
        steps(text)


def test_the_image_begins_with_what_it_is_built_from(image):
    assert [word for word, _ in image][:3] == ["ARG", "FROM", "ARG"]
    names = {rest.partition("=")[0] for rest in of(image, "ARG")}
    used = set(re.findall(r"\$\{?([A-Z_]+)", " ".join(of(image, "FROM") + of(image, "RUN"))))
    assert used == names == {"BASE", "TORCH_INDEX"}


def test_who_is_told_of_another_base_is_told_of_its_torch(image):
    """The default torch has no CUDA: on another base alone the server would decode on the CPU."""
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in of(image, "ARG")
    guide = (ROOT / "docs" / "guide" / "serving.md").read_text()
    for text in (guide, (DEPLOY / "Dockerfile").read_text()):
        told = re.findall(r"--build-arg (\w+)=", text)
        assert told == ["BASE", "TORCH_INDEX"]


def test_its_shell_can_be_read_and_finds_what_it_looks_for(image):
    for line in of(image, "RUN"):
        subprocess.run(["sh", "-n", "-c", line], check=True)
    install = " ".join(of(image, "RUN"))
    pattern = re.search(r"grep '([^']+)' constraints\.txt", install)[1]
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(pattern, line)]
    assert len(pinned) == 1
    assert pinned[0].split(";")[0].strip().startswith("torch==")
    extra = re.search(r'"\.\[(\w+)\]"', install)[1]
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_it_does_not_run_as_root_and_owns_its_cache(image):
    user = of(image, "USER")[-1]
    assert user not in ("root", "0")
    made = next(line for line in of(image, "RUN") if "useradd" in line)
    cache = re.search(rf"install -d -o {user} -g {user} (\S+)", made)[1]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert f"cache:{cache}" in compose["services"]["mlspec"]["volumes"]
    assert [word for word, _ in image].index("USER") > [word for word, _ in image].index("COPY")


def test_what_it_starts_is_a_command_of_ours(image):
    words = json.loads(of(image, "ENTRYPOINT")[0])
    assert words[0] == "mlspec"
    args = read(words[1:])
    assert (args.command, args.host, args.port, args.model) == ("serve", "0.0.0.0", int(of(image, "EXPOSE")[0]), None)
    check = re.search(r"CMD\s+(\[.*\])", of(image, "HEALTHCHECK")[0])[1]
    program, option, source = json.loads(check)
    compile(source, "healthcheck", "exec")
    assert (program, option) == ("python3", "-c")
    assert f"127.0.0.1:{args.port}/health" in source
    assert of(image, "STOPSIGNAL") == ["SIGTERM"]


def test_compose_starts_it_for_this_machine_alone(image):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose) == {"services", "volumes"}
    one = compose["services"]["mlspec"]
    assert (DEPLOY / one["build"]["context"]).resolve() == ROOT
    assert (ROOT / one["build"]["dockerfile"]).is_file()
    assert one["ports"] == [f"127.0.0.1:{of(image, 'EXPOSE')[0]}:{of(image, 'EXPOSE')[0]}"]
    assert {volume.split(":")[0] for volume in one["volumes"]} == set(compose["volumes"])
    assert one["cap_drop"] == ["ALL"]
    assert one["read_only"] is True
    grace = read(["serve"]).grace
    assert int(one["stop_grace_period"].removesuffix("s")) > grace


def test_the_command_that_compose_shows_can_be_read(image):
    shown = re.search(r"command: (\[.*\])", (DEPLOY / "compose.yaml").read_text())[1]
    args = read([*json.loads(of(image, "ENTRYPOINT")[0])[1:], *json.loads(shown)])
    assert (args.model, args.levels, args.api_key_file) == (TARGET, ["mxfp4"], "/run/secrets/keys")


def test_the_unit_starts_it_and_waits_for_answers():
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str
    unit.read_string((DEPLOY / "mlspec.service").read_text())
    program, *words = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "mlspec"
    args = read(words)
    assert args.command == "serve"
    assert args.api_key_file == "${CREDENTIALS_DIRECTORY}/" + unit["Service"]["LoadCredential"].split(":")[0]
    assert int(unit["Service"]["TimeoutStopSec"]) > args.grace
    assert unit["Service"]["NoNewPrivileges"] == unit["Service"]["DynamicUser"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize(("word", "other", "told"), [
    ("", "", ""), ("NoNewPrivileges=", "NoNewPriviledges=", "Unknown key 'NoNewPriviledges' in section [Service]"),
    ("TimeoutStopSec=45", "TimeoutStopSec=soon", "Failed to parse time value"),
])  # fmt: skip
def test_systemd_reads_the_unit_and_says_nothing_of_it(tmp_path, word, other, told):
    """It asks whether the program is there: the tests' own stands for it."""
    text = (DEPLOY / "mlspec.service").read_text()
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)[1]
    (tmp_path / "mlspec.service").write_text(text.replace(program, sys.executable).replace(word, other))
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", str(tmp_path / "mlspec.service")],
                           capture_output=True, text=True, check=False)
    assert found.returncode == 0
    assert told in found.stdout + found.stderr
    assert bool(found.stdout + found.stderr) == bool(told)


def compose_commands() -> list[list[str]]:
    """`docker compose` and `docker-compose`, those that are installed."""
    known = [["docker", "compose"], ["docker-compose"]]
    return [words for words in known if shutil.which(words[0]) is not None
            and subprocess.run([*words, "version"], capture_output=True, check=False).returncode == 0]


def test_compose_reads_its_file_and_means_what_we_do(tmp_path):
    """`config` needs no daemon: it checks the file against Compose's own schema and prints what it understood."""
    if not (commands := compose_commands()):
        pytest.skip("Compose is not installed")
    for words in commands:
        found = subprocess.run([*words, "-f", str(DEPLOY / "compose.yaml"), "config"], capture_output=True, text=True,
                               check=False)
        assert found.returncode == 0, found.stderr
        one = yaml.safe_load(found.stdout)["services"]["mlspec"]
        assert (Path(one["build"]["context"]), one["build"]["dockerfile"]) == (ROOT, "deploy/Dockerfile")
        assert "127.0.0.1" in str(one["ports"])
        (tmp_path / "compose.yaml").write_text("services: {mlspec: {image: mlspec, read_onyl: true}}\n")
        wrong = subprocess.run([*words, "-f", str(tmp_path / "compose.yaml"), "config"], capture_output=True,
                               text=True, check=False)
        assert wrong.returncode != 0
        assert "read_onyl" in wrong.stderr


def test_no_build_product_and_no_history_goes_into_the_image():
    left_out = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
                if line and not line.startswith("#")]
    for name in (".git", ".venv", "build", "hf_mlspec/_C.so", "hf_mlspec/serving/__pycache__"):
        assert any(fnmatch(name, pattern) or fnmatch(f"/{name}", pattern) for pattern in left_out), name
    for name in ("setup.py", "constraints.txt", "hf_mlspec/demo_pair/target/config.json", "kernels_ext/formats.h"):
        assert (ROOT / name).exists()
        assert not any(fnmatch(name, pattern) for pattern in left_out), name


def test_the_health_check_fails_where_nobody_answers(image):
    source = json.loads(re.search(r"CMD\s+(\[.*\])", of(image, "HEALTHCHECK")[0])[1])[2]
    port = str(_closed_port())
    found = subprocess.run([sys.executable, "-c", source.replace(":8000/", f":{port}/")], capture_output=True,
                           check=False)
    assert found.returncode != 0


def _closed_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
