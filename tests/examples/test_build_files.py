"""A clone and an installed wheel serve CMake and pkg-config, and bring the examples."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moepack
from tests.support.children import PATIENCE, run_command

ROOT = Path(__file__).parents[2]
PACK = ROOT / "conformance" / "packs" / "layers"
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
for path in WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"]):
    print(path)
"""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack a wheel into a folder whose name has a space; return the folder."""
    folder = tmp_path_factory.mktemp("a wheel")
    command = [sys.executable, "-c", BUILD, str(ROOT), str(folder)]
    output = subprocess.check_output(command, text=True, timeout=PATIENCE)
    with zipfile.ZipFile(output.splitlines()[-1]) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(params=["clone", "wheel"])
def include(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return what `moepack include-dir` prints, in a clone and where a wheel is installed."""
    site = ROOT if request.param == "clone" else request.getfixturevalue("wheel")
    command = [sys.executable, "-m", "moepack", "include-dir"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    printed = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    folder = Path(printed.rstrip("\n"))
    assert folder.is_relative_to(site)
    return folder


def require(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")


def run(*command: str | Path, **variables: str) -> str:
    done = run_command(*command, env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cmake_builds_the_examples(include: Path, tmp_path: Path) -> None:
    """They lie beside the header's folder."""
    require("cmake")
    prefix = f"-DCMAKE_PREFIX_PATH={include}"
    run("cmake", "-S", include.parent / "examples", "-B", tmp_path, prefix)
    run("cmake", "--build", tmp_path)
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
    command = ["cmake", str(tmp_path), f"-DCMAKE_PREFIX_PATH={ROOT / 'include'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bool(done.returncode) == is_refused, done.stderr
    assert is_refused or f"moepack={moepack.__version__}\n" in done.stdout
    assert not is_refused or f"version: {moepack.__version__}" in done.stderr


def test_pkg_config_prints_the_flags(include: Path, tmp_path: Path) -> None:
    require("pkg-config")
    require("cc")
    path = {"PKG_CONFIG_PATH": str(include / "pkgconfig")}
    assert run("pkg-config", "--modversion", "moepack", **path) == f"{moepack.__version__}\n"
    source = include.parent / "examples" / "routed_experts.c"
    script = 'eval cc "$(pkg-config --cflags moepack)" \'"$1"\' -o \'"$2"\''
    run("sh", "-c", script, "sh", source, tmp_path / "program", **path)
    assert len(run(tmp_path / "program", PACK, "0", "1").splitlines()) == 3
