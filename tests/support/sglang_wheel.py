"""SGLang's own code for expert packs, from its wheel, which `make engines` fetches.

Its tools are scripts that need gguf-py alone. Its reader imports torch at the top and uses it only
on a GPU, so that an empty module is enough to open a pack. Tests are skipped without the wheel.
"""

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

_DEFAULT = Path(__file__).parents[2] / "build" / "sglang"
FOLDER = Path(os.environ.get("MOEPACK_SGLANG") or _DEFAULT).absolute()


def require_sglang() -> None:
    """Skip the test where SGLang was not fetched."""
    if not (FOLDER / "sglang" / "srt" / "model_loader" / "expert_pack").is_dir():
        pytest.skip("PyPI's sglang is not there (make engines)")


def run_tool(name: str, *arguments: object) -> dict[str, Any]:
    """Run one of the tools, and return what it prints; raise CalledProcessError if it fails."""
    tool = FOLDER / "sglang" / "srt" / "model_loader" / "expert_pack" / name
    words = [sys.executable, str(tool), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def open_store(pack: Path, **expected: Any) -> Any:
    """Open a pack by the reader that SGLang runs with."""
    spec = importlib.util.spec_from_file_location(
        "sglang_expert_pack", FOLDER / "sglang" / "srt" / "layers" / "moe" / "expert_pack.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", types.ModuleType("torch"))
        patch.setitem(sys.modules, spec.name, module)  # where its dataclasses look
        spec.loader.exec_module(module)
    return module.ExpertPackStore(pack, **expected)


def ggml_moe_pack_tool() -> Any:
    """Import the module that writes and validates GGMLMOEPACKv1 for Kimi K3."""
    folder = FOLDER / "sglang" / "srt" / "model_loader" / "expert_pack"
    spec = importlib.util.spec_from_file_location("sglang_kimi_ggml", folder / "kimi_ggml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    return module
