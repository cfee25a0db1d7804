"""The libraries of native/: compiled by any compiler, tried, and found with sources or cached."""

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
    SOURCES,
    CompileError,
    compile_library,
    find_compiled,
    installed_compilers,
)
from moepack.running.programs.library import find_library
from tests.support.children import run_child
from tests.support.needs import needs_library
from tests.support.preloaded import write_native

STRICT = ("-Wall", "-Wextra", "-Werror")
MACHINE = platform.machine()


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the C files; of each library two are compiled."""
    folder = write_native(tmp_path / "sources")
    for name, names in (("seam", ("program", "order")), ("cache", ("library", "order"))):
        monkeypatch.setitem(SOURCES, name, names)
    return folder


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("compiler", ["cc", "clang", "gcc"])
def test_each_compiler_makes_a_library_that_can_be_loaded(
    compiler: str, native: Path, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    folder = tmp_path / "made"
    folder.mkdir()
    library = compile_library(native, "seam", folder, compilers=[(compiler,)], flags=STRICT)
    assert ctypes.CDLL(str(library)).moepack_answer() == 23
    assert find_compiled(native, "seam", folder, MACHINE) == library
    assert list(folder.iterdir()) == [library]
    assert find_compiled(native, "cache", folder, MACHINE) is None, "the other has other files"


@needs_library
def test_a_compiler_that_fails_is_followed_by_the_next(native: Path, tmp_path: Path) -> None:
    broken = write_script(tmp_path / "broken", 'echo "order.c:1: error: no headers" >&2; exit 1')
    compilers = [(str(broken),), ("cc",)]
    assert compile_library(native, "seam", tmp_path, compilers=compilers).exists()
    with pytest.raises(CompileError, match="broken: order.c:1: error: no headers"):
        compile_library(native, "seam", tmp_path, compilers=[(str(broken),)])


@needs_library
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", "made no library"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "made no library"),
        (
            'while [ "$1" != -o ]; do shift; done; echo "int main(void) { return 0; }" > "$2.c";'
            ' exec cc "$2.c" -o "$2"',
            "rror",
        ),
    ],
)
def test_what_a_compiler_made_is_tried(
    script: str, problem: str, native: Path, tmp_path: Path
) -> None:
    liar = write_script(tmp_path / "liar", script)
    with pytest.raises(CompileError, match=problem):
        compile_library(native, "seam", tmp_path, compilers=[(str(liar),)])
    assert not list(tmp_path.glob("*.so"))


@needs_library
def test_no_source_and_no_library_may_differ_by_a_byte(native: Path, tmp_path: Path) -> None:
    library = compile_library(native, "seam", tmp_path)
    content = library.read_bytes()
    for changed in ("native/order.c", "native/seam.h", "include/moepack.h"):
        source = native.parent / changed
        before = source.read_bytes() if source.exists() else None
        source.write_bytes((before or b"") + b"\n")
        assert find_compiled(native, "seam", tmp_path, MACHINE) is None
        if before is None:
            source.unlink()
        else:
            source.write_bytes(before)
        assert find_compiled(native, "seam", tmp_path, MACHINE) == library
    library.write_bytes(bytes([*content[:9], content[9] ^ 1, *content[10:]]))
    assert find_compiled(native, "seam", tmp_path, MACHINE) is None
    assert compile_library(native, "seam", tmp_path) == library
    assert find_compiled(native, "seam", tmp_path, MACHINE) == library


def test_each_c_file_is_in_a_library() -> None:
    files = {path.stem for path in Path("native").glob("*.c")}
    assert files == {name for names in SOURCES.values() for name in names}


def test_other_machines_are_refused_by_name(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(CompileError, match="not written for riscv64"):
        compile_library(native, "seam", tmp_path)


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


@needs_library
def test_what_the_package_brought_is_used(cache: Path, native: Path) -> None:
    library = compile_library(native, "seam", native)
    assert find_library("seam", native=native, compilers=[]) == library
    assert not cache.exists()


@needs_library
def test_the_first_use_compiles_and_the_next_finds_it(cache: Path, native: Path) -> None:
    library = find_library("seam", native=native)
    assert library.parent == cache
    assert find_library("seam", native=native, compilers=[]) == library


def test_another_system_is_refused_by_its_name(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(MachineError, match="on Linux, not on Darwin"):
        find_library("seam", native=native)


def test_without_a_compiler_the_hint_says_what_to_install(cache: Path, native: Path) -> None:
    with pytest.raises(MachineError, match="no C compiler is installed") as caught:
        find_library("seam", native=native, compilers=[])
    assert "apt install gcc" in str(caught.value.hint)
    assert "pip install ziglang" in str(caught.value.hint)


@needs_library
def test_without_a_cache_it_lies_in_a_folder_that_goes_away(cache: Path, native: Path) -> None:
    cache.parent.write_text("a file, where a folder is to be")
    code = """
        import pathlib, sys
        from moepack.running.programs.library import find_library
        print(find_library("seam", native=pathlib.Path(sys.argv[1])))
    """
    library = Path(run_child(code, native).strip())
    assert library.name.startswith("seam-")
    assert not library.parent.exists()


@needs_library
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_write_to_is_not_used(cache: Path, native: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    library = find_library("seam", native=native)
    assert library.parent != cache
    assert not list(cache.iterdir())


@needs_library
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_not_used(cache: Path, native: Path) -> None:
    library = find_library("seam", native=native)
    os.chown(library, 65534, 65534)
    with pytest.raises(MachineError):
        find_library("seam", native=native, compilers=[])


@needs_library
def test_a_path_that_the_dynamic_linker_would_split_is_left_for_another(
    cache: Path, tmp_path: Path
) -> None:
    native = write_native(tmp_path / "my models")
    compile_library(native, "seam", native)
    library = find_library("seam", native=native, compilers=[])
    assert library.parent == cache
    environment = os.environ | {"LD_PRELOAD": str(library), "TELL": "1"}
    output = subprocess.check_output([shutil.which("true") or ""], env=environment, text=True)
    assert output == "loaded\n"


def test_where_no_folder_will_do_the_hint_names_tmpdir(
    cache: Path, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.write_text("no folder")
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a b"))
    with pytest.raises(MachineError, match="spaces") as caught:
        find_library("seam", native=native)
    assert caught.value.hint == "set TMPDIR to another folder"
