"""Wheels bring the libraries of native/ if they can be compiled, else they are of no machine."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moepack.running.programs import compiling
from moepack.running.programs.compiling import SOURCES, find_compiled
from tests.support.children import PATIENCE, run_child
from tests.support.needs import needs_library
from tests.support.preloaded import write_native

ROOT = Path(__file__).parents[3]
MACHINE = platform.machine()
BUILD = """
import sys
from importlib.machinery import PathFinder
if sys.argv[1] == "without zig":
    find_spec = PathFinder.find_spec
    PathFinder.find_spec = lambda name, *rest: None if name == "ziglang" else find_spec(name, *rest)
from hatchling.builders.wheel import WheelBuilder
for path in WheelBuilder(".").build(directory="dist", versions=["standard"]):
    print(path)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the files of a wheel, as little of moepack as the hook needs."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*cache*"))
    for name in ("layouts", "include", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one").touch()
    for name in ("__init__.py", "version.py", "running/programs/compiling.py"):
        (tmp_path / "moepack" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "moepack" / name, tmp_path / "moepack" / name)
    write_native(tmp_path)
    return tmp_path


def build(project: Path, *, zig: bool = False, **names: str) -> Path:
    command = [sys.executable, "-c", BUILD, "with zig" if zig else "without zig"]
    output = subprocess.check_output(
        command, cwd=project, env=os.environ | names, text=True, timeout=PATIENCE
    )
    return project / output.splitlines()[-1]


def install(project: Path) -> None:
    """Run the hook as in an editable install."""
    code = """
        import sys
        from hatchling.bridge.app import Application
        from hatch_build import BuildHook
        hook = BuildHook(sys.argv[1], {}, None, None, "dist", "wheel", Application())
        hook.initialize("editable", {})
    """
    run_child(code, project)


def libraries(wheel: Path, folder: Path) -> list[Path]:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return sorted(folder.rglob("*.so"))


def compiled_in(native: Path, machine: str = MACHINE) -> list[Path]:
    """Return the libraries of all names that are whole, and of these sources."""
    found = [find_compiled(native, name, native, machine) for name in SOURCES]
    return sorted(one for one in found if one is not None)


@needs_library
def test_a_wheel_brings_the_libraries_and_is_of_one_machine(project: Path, tmp_path: Path) -> None:
    """Old libraries of a checkout stay there."""
    install(project)
    (project / "native" / "slots.c").write_text("int another;\n")
    before = list((project / "native").glob("*.so"))
    wheel = build(project)
    assert wheel.name.endswith(f"-py3-none-linux_{MACHINE}.whl")
    brought = libraries(wheel, tmp_path / "unpacked")
    assert len(brought) == len(SOURCES)
    assert brought == compiled_in(tmp_path / "unpacked" / "moepack" / "native")
    assert list((project / "native").glob("*.so")) == before


def test_without_a_compiler_a_wheel_is_for_all_machines(project: Path, tmp_path: Path) -> None:
    wheel = build(project, PATH="/nothing")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not libraries(wheel, tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "moepack" / "native" / "program.c").exists()
    assert (tmp_path / "unpacked" / "moepack" / "include" / "moepack.h").exists()


@needs_library
def test_a_checkout_keeps_the_libraries_beside_their_sources(project: Path) -> None:
    native = project / "native"
    install(project)
    first = compiled_in(native)
    (native / "order.c").write_text("int another;\n")
    install(project)
    second = compiled_in(native)
    assert len(first) == len(second) == len(SOURCES)
    assert sorted(native.glob("*.so")) == second != first


def test_a_wheel_to_be_published_needs_its_compiler(project: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        build(project, MOEPACK_WHEEL_MACHINE="aarch64")


@pytest.mark.slow
@pytest.mark.parametrize("machine", compiling.MACHINES)
def test_a_wheel_to_be_published_names_its_glibc(
    machine: str, project: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ziglang")
    wheel = build(project, zig=True, MOEPACK_WHEEL_MACHINE=machine)
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    brought = libraries(wheel, tmp_path / "unpacked")
    assert len(brought) == len(SOURCES)
    assert brought == compiled_in(tmp_path / "unpacked" / "moepack" / "native", machine)
