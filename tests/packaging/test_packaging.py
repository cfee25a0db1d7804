"""The files in packaging/: what they promise of rights, and how they start a server."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.children import PATIENCE, Piped, run_command
from tests.support.models import FIXTURES
from tests.support.needs import needs_llama

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "moepack@.service"
MODEL = FIXTURES / "chat-00001-of-00002.gguf"
SERVE = ("-m", "moepack", "serve", MODEL, "--port", "0", "-c", "256", "-t", "1")
CONTAINED = """
import ctypes, os, sys
from tests.support.seccomp import contain
contain()
assert not ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)  # PR_SET_MDWE: nothing written is executed
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
NO_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
READ_ONLY = 'mount -o remount,bind,ro / && mount -t tmpfs -o size=16m tmpfs "$TMPDIR" && exec "$@"'


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"there is no {', '.join(missing)} here")


@contextmanager
def started(*command: object, **options: Any) -> Iterator[str]:
    """Start a server, and yield its address."""
    with Piped(*command, cwd=ROOT, **options) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on http://"), process.stderr.read()
            yield line.split()[-1]
        finally:
            process.terminate()


def answers(url: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
    assert answer["usage"]["completion_tokens"] > 0


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Write the unit with a program that is there."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/moepack/bin/moepack", sys.executable))
    return path


@needs("systemd-analyze")
def test_systemd_finds_no_fault_with_the_unit(unit: Path) -> None:
    ended = run_command("systemd-analyze", "verify", unit.with_name("moepack@qwen3.service"))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr


@needs("systemd-analyze")
def test_the_unit_is_as_safe_as_the_page_says(unit: Path) -> None:
    ended = run_command("systemd-analyze", "security", "--offline=true", "--no-pager", unit)
    (level,) = re.findall(r"exposure level .*: ([0-9.]+) ", ended.stdout)
    assert f"gives it {level} of 10" in (ROOT / "docs" / "operate.md").read_text()


def calls_in(group: str) -> set[str]:
    """Return the system calls of a group of systemd's, and of those in it."""
    shown = run_command("systemd-analyze", "syscall-filter", "--no-pager", group).stdout
    words = {line.strip() for line in shown.splitlines()[1:] if not line.strip().startswith("#")}
    groups = {word for word in words if word.startswith("@")}
    return (words - groups).union(*map(calls_in, groups))


@pytest.mark.long
@needs_llama
@needs("systemd-analyze", "strace")
def test_the_unit_allows_the_system_calls_that_a_server_makes(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    with started("strace", "-D", "-f", "-qq", "-o", log, sys.executable, *SERVE) as url:
        answers(url)
    made = set(re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE))
    assert len(made) > 50
    assert made <= calls_in("@system-service")


@pytest.mark.long
@needs_llama
@needs("unshare", "setpriv")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_server_needs_no_rights_and_writes_nothing(tmp_path: Path) -> None:
    """As in the container and the unit; and the container's check of health finds it healthy."""
    names = os.environ | {
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": "/state",
        "XDG_CACHE_HOME": "/state",
    }
    room = ("unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh")
    command = (*room, *NO_RIGHTS, sys.executable, "-c", CONTAINED, *SERVE)
    with started(*command, env=names | {"PYTHONDONTWRITEBYTECODE": "1"}) as url:
        answers(url)
        assert run_command(*health_check(url)).returncode == 0
    assert run_command(*health_check(url)).returncode != 0


def health_check(url: str) -> list[str]:
    (words,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", dockerfile(), re.MULTILINE)
    python, *rest = json.loads(words.replace("http://127.0.0.1:8080", url))
    assert python == "python3"
    return [sys.executable, *rest]


def dockerfile() -> str:
    return (PACKAGING / "Dockerfile").read_text()


def test_the_image_has_all_that_a_wheel_is_made_of() -> None:
    """Docker sends what the second file lets through, whatever else lies in a checkout."""
    sent = re.findall(r"^!(\S+)$", (PACKAGING / "Dockerfile.dockerignore").read_text(), re.M)
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")
    assert set(sent) <= {line.partition("/")[0] for line in tracked}
    project = (ROOT / "pyproject.toml").read_text()
    sources = re.findall(r'^(\w+) = "moepack/\1"$', project, re.MULTILINE)
    assert sources
    assert {*sources, "moepack", "native", "pyproject.toml", "hatch_build.py"} <= set(sent)


@pytest.mark.long
@needs_llama
def test_llama_swap_s_command_starts_a_server() -> None:
    """It forwards the name by which it is called, which the page says how to allow."""
    (words,) = re.findall(r"cmd: moepack (.*)", (PACKAGING / "llama-swap.yaml").read_text())
    words = words.replace("${PORT}", "0").replace("/srv/models/qwen3.moepack", str(MODEL))
    (allowed,) = re.findall(r"`(--cors-origins \S+)`", (ROOT / "docs" / "operate.md").read_text())
    allowed = allowed.replace("NAME", "box.lan")
    with started(sys.executable, "-m", "moepack", *words.split(), *allowed.split()) as url:
        for host, status in (("box.lan", 200), ("other.lan", 403)):
            models = httpx.get(f"{url}/v1/models", headers={"Host": f"{host}:9292"})
            assert models.status_code == status
