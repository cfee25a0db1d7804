"""The folder of headers serves CMake and pkg-config."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import moepack
from tests.support.children import run_command
from tests.support.needs import needs_library

ROOT = Path(__file__).parents[2]
PACK = ROOT / "conformance" / "packs" / "layers"
INCLUDE = ROOT / "include"

pytestmark = pytest.mark.long


def require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")


def run(*command: str | Path, **variables: str) -> str:
    done = run_command(*command, env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_library
def test_cmake_builds_the_examples(tmp_path: Path) -> None:
    require("cmake")
    prefix = f"-DCMAKE_PREFIX_PATH={INCLUDE}"
    run("cmake", "-S", ROOT / "examples", "-B", tmp_path, prefix)
    run("cmake", "--build", tmp_path, "--parallel", "2")
    assert len(run(tmp_path / "routed_experts", PACK, "0", "1").splitlines()) == 3
    assert run(tmp_path / "expert_cache", PACK, "0", "0:1").startswith("dense ")
    assert len(run(tmp_path / "resident_experts", PACK, "1000000", "0", "1").splitlines()) == 3


@pytest.mark.parametrize(
    ("wanted", "is_refused"),
    [("", False), ("0.0.9", False), (moepack.__version__, False), ("0.9", True), ("1.0", True)],
)
def test_cmake_refuses_a_version_that_is_too_old(
    wanted: str, is_refused: bool, tmp_path: Path
) -> None:
    require("cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(engine LANGUAGES NONE)\n"
        f"find_package(moepack {wanted} REQUIRED)\nmessage(STATUS moepack=${{moepack_VERSION}})\n"
    )
    command = ["cmake", str(tmp_path), f"-DCMAKE_PREFIX_PATH={INCLUDE}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == is_refused, done.stderr
    assert is_refused or f"moepack={moepack.__version__}\n" in done.stdout
    assert not is_refused or f"version: {moepack.__version__}" in done.stderr


def test_pkg_config_prints_the_flags(tmp_path: Path) -> None:
    require("pkg-config")
    require("cc")
    path = {"PKG_CONFIG_PATH": str(INCLUDE / "pkgconfig")}
    assert run("pkg-config", "--modversion", "moepack", **path) == f"{moepack.__version__}\n"
    source = ROOT / "examples" / "routed_experts.c"
    script = 'eval cc "$(pkg-config --cflags moepack)" \'"$1"\' -o \'"$2"\''
    run("sh", "-c", script, "sh", source, tmp_path / "program", **path)
    assert len(run(tmp_path / "program", PACK, "0", "1").splitlines()) == 3
