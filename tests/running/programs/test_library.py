"""The preloaded library: compiled by any compiler, tried, and found beside its source or cached."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moepack.common.errors import MachineError
from moepack.running.programs.compiling import (
    CompileError,
    compile_library,
    find_compiled,
    installed_compilers,
)
from moepack.running.programs.runner import find_library
from tests.support.children import run_child
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moepack"


def test_what_the_package_brought_is_used(cache: Path, source: Path) -> None:
    library = compile_library(source, source.parent)
    assert find_library(source, compilers=[]) == library
    assert not cache.exists()


def test_the_first_use_compiles_and_the_next_finds_it(cache: Path, source: Path) -> None:
    library = find_library(source)
    assert library.parent == cache
    assert find_library(source, compilers=[]) == library


def test_another_system_is_refused_by_its_name(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(MachineError, match="on Linux, not on Darwin"):
        find_library(source)


def test_without_a_compiler_the_hint_says_what_to_install(cache: Path, source: Path) -> None:
    with pytest.raises(MachineError, match="no C compiler is installed") as caught:
        find_library(source, compilers=[])
    assert "apt install gcc" in str(caught.value.hint)
    assert "pip install ziglang" in str(caught.value.hint)


def test_without_a_cache_it_lies_in_a_folder_that_goes_away(cache: Path, source: Path) -> None:
    cache.parent.write_text("a file, where a folder is to be")
    code = """
        import pathlib, sys
        from moepack.running.programs.runner import find_library
        print(find_library(pathlib.Path(sys.argv[1])))
    """
    library = Path(run_child(code, source).strip())
    assert library.name.startswith("preload-")
    assert not library.parent.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_write_to_is_not_used(cache: Path, source: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    library = find_library(source)
    assert library.parent != cache
    assert not list(cache.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_used(cache: Path, source: Path) -> None:
    library = find_library(source)
    os.chown(library, 65534, 65534)
    with pytest.raises(MachineError):
        find_library(source, compilers=[])


def test_a_path_that_the_dynamic_linker_would_split_is_left_for_another(
    cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    source = write_source(folder)
    compile_library(source, folder)
    library = find_library(source, compilers=[])
    assert library.parent == cache
    environment = os.environ | {"LD_PRELOAD": str(library), "TELL": "1"}
    output = subprocess.check_output([shutil.which("true") or ""], env=environment, text=True)
    assert output == "loaded\n"


def test_where_no_folder_will_do_the_hint_names_tmpdir(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.write_text("no folder")
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a b"))
    with pytest.raises(MachineError, match="spaces") as caught:
        find_library(source)
    assert caught.value.hint == "set TMPDIR to another folder"
