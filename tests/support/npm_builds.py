"""Builds of llama.cpp from npm, which `make engines` fetches; tests are skipped without."""

import os
import shutil
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).parents[2] / "build" / "node"
FOLDER = Path(os.environ.get("MOEPACK_NODE") or _DEFAULT).absolute()


def require_build(name: str) -> Path:
    """Return the folder of a build's libraries; skip the test where it was not fetched."""
    folder = FOLDER / "node_modules" / "@node-llama-cpp" / name / "bins" / name
    if not folder.is_dir():
        pytest.skip(f"npm's @node-llama-cpp/{name} is not there (make engines)")
    return folder


def require_node() -> None:
    """Skip the test where there is no node, or node-llama-cpp was not fetched."""
    if shutil.which("node") is None:
        pytest.skip("there is no node here")
    if not (FOLDER / "node_modules" / "node-llama-cpp").is_dir():
        pytest.skip("npm's node-llama-cpp is not there (make engines)")
    require_build("linux-x64")


def require_software_gpu() -> dict[str, str]:
    """Return the variables by which Vulkan computes on the processor; skip the test without."""
    drivers = sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))
    if not drivers:
        pytest.skip("Mesa's lavapipe is not there (Debian's mesa-vulkan-drivers)")
    return {"VK_ICD_FILENAMES": str(drivers[0]), "GGML_VK_VISIBLE_DEVICES": "0"}
