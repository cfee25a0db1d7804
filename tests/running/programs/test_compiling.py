"""The preloaded library is compiled by whichever compiler there is, and tried before it counts."""

import ctypes
import platform
import shutil
import sys
from pathlib import Path

import pytest

from moepack.running.programs.compiling import (
    CompileError,
    compile_library,
    find_compiled,
    installed_compilers,
)
from tests.support.preloaded import write_source

STRICT = ("-Wall", "-Wextra", "-Werror")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path)


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("compiler", ["cc", "clang", "gcc"])
def test_each_compiler_makes_a_library_that_can_be_loaded(
    compiler: str, source: Path, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    library = compile_library(source, tmp_path, compilers=[(compiler,)], flags=STRICT)
    assert ctypes.CDLL(str(library)).moepack_answer() == 23
    assert find_compiled(source, tmp_path, platform.machine()) == library
    assert sorted(path.name for path in tmp_path.iterdir()) == [library.name, "preload.c"]


def test_a_compiler_that_fails_is_followed_by_the_next(source: Path, tmp_path: Path) -> None:
    broken = write_script(tmp_path / "broken", 'echo "preload.c:1: error: no headers" >&2; exit 1')
    compilers = [(str(broken),), ("cc",)]
    assert compile_library(source, tmp_path, compilers=compilers).exists()
    with pytest.raises(CompileError, match="broken: preload.c:1: error: no headers"):
        compile_library(source, tmp_path, compilers=[(str(broken),)])


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", "made no library"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "made no library"),
        ("exec cc -c $(echo $* | sed 's/-shared//; s/-Wl[^ ]*//g; s/-l[a-z]*//g')", "rror"),
    ],
)
def test_what_a_compiler_made_is_tried(
    script: str, problem: str, source: Path, tmp_path: Path
) -> None:
    liar = write_script(tmp_path / "liar", script)
    with pytest.raises(CompileError, match=problem):
        compile_library(source, tmp_path, compilers=[(str(liar),)])
    assert not list(tmp_path.glob("*.so"))


def test_the_source_or_the_library_may_not_differ_by_a_byte(source: Path, tmp_path: Path) -> None:
    machine = platform.machine()
    library = compile_library(source, tmp_path)
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert find_compiled(source, tmp_path, machine) is None
    assert compile_library(source, tmp_path) == library
    assert find_compiled(source, tmp_path, machine) == library
    source.write_text(source.read_text() + "\n")
    assert find_compiled(source, tmp_path, machine) is None


def test_other_machines_are_refused_by_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(CompileError, match="not written for riscv64"):
        compile_library(source, tmp_path)


def test_zig_comes_after_the_compilers_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    write_script(tmp_path / "clang", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_compilers() == [("clang",), (sys.executable, "-m", "ziglang", "cc")]
