"""Readers that announce what they read, and others that do not, get right bytes of one cache."""

import subprocess
from pathlib import Path

import pytest

from tests.support.children import PATIENCE
from tests.support.native import NATIVE, compiled_once, sources


@pytest.fixture(scope="session")
def readers() -> Path:
    files = [one for one in sources("cache") if one.stem != "library"]
    source = Path(__file__).parent / "readers.c"
    flags = ("-std=gnu17", "-Wall", "-Wextra", "-g", "-O1", "-Wl,--wrap=pread")
    files += [NATIVE / "digest.c"]
    return compiled_once("readers", "gcc", *flags, source, *files, "-lm", "-lpthread")


@pytest.mark.parametrize(("reads", "fails"), [(0, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_readers_get_the_bytes_of_their_experts(
    readers: Path, tmp_path: Path, reads: int, seed: int, fails: int
) -> None:
    words = (tmp_path / "file", reads, seed, 60, fails)
    run = subprocess.run(
        [readers, *map(str, words)], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
