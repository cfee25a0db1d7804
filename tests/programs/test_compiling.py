"""The preloaded library is compiled by whichever compiler there is, and tried before it counts."""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moepack
from moepack.programs import compiling
from moepack.programs.compiling import (
    CompileError,
    compile_library,
    cross_compile_library,
    find_compiled,
    installed_compilers,
)
from tests.support.children import PATIENCE
from tests.support.preloaded import write_source

REAL = Path(moepack.__file__).parent / "pager" / "preload.c"
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


@pytest.mark.skipif(not REAL.exists(), reason="the preloaded library has no source yet")
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_no_complaint_about_the_source(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    compile_library(REAL, tmp_path, compilers=[(compiler,)], flags=STRICT)


@pytest.mark.slow
@pytest.mark.parametrize("machine", compiling.MACHINES)
def test_zig_makes_libraries_for_other_machines(machine: str, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    library = cross_compile_library(source, tmp_path, machine)
    assert find_compiled(source, tmp_path, machine) == library
    if machine == platform.machine():
        assert ctypes.CDLL(str(library)).moepack_answer() == 23


def test_a_library_for_arm_is_loaded_there(source: Path, tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
    for name in (compiler, emulator):
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name} here")
    library = compiling._compile(source, tmp_path, "aarch64", [(compiler,)], STRICT)
    program = tmp_path / "program.c"
    program.write_text(
        "#include <dlfcn.h>\n"
        "int main(int count, char **names) {\n"
        "    void *library = count > 1 ? dlopen(names[1], RTLD_NOW) : 0;\n"
        '    int (*answer)(void) = library ? dlsym(library, "moepack_answer") : 0;\n'
        "    return answer ? answer() : 1;\n"
        "}\n"
    )
    binary = tmp_path / "program"
    subprocess.run([compiler, program, "-o", binary, "-ldl"], check=True, timeout=PATIENCE)
    emulated = [emulator, "-L", "/usr/aarch64-linux-gnu", str(binary), str(library)]
    assert subprocess.run(emulated, timeout=PATIENCE).returncode == 23


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
