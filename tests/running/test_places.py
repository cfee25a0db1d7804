"""Every expert is brought to where a stock GGUF of the same model has it."""

import mmap
from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack.engines.gguf_layout import lay_out
from moepack.engines.stock_gguf import export_gguf
from moepack.errors import PackError
from moepack.running.expert_memory import ExpertMemory
from moepack.running.expert_store import bring
from moepack.running.places import find_places, length_of
from moepack.sizes import align
from tests.support.gguf_builder import Q8_0, moe
from tests.support.models import REAL_MODELS, pack_model
from tests.support.odd_models import legacy

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model with chunk experts, experts in attention, and a layer of MTP."""
    folder = tmp_path_factory.mktemp("families")
    builder = moe((0, 1, 2), experts=8)
    builder.put("qwen3moe.experts_per_group", "u32", 4).put(
        "qwen3moe.nextn_predict_layers", "u32", 1
    )
    builder.put("qwen3moe.attention.value_expert_count", "u32", 3)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    builder.tensor("blk.1.attn_v_exps.weight", (64, 16, 3), Q8_0, 68)
    pack_model([builder.write(folder / "m.gguf")], folder / "pack")
    return folder / "pack"


@pytest.mark.parametrize("model", [*REAL_MODELS, "families"])
def test_experts_are_brought_to_where_a_gguf_has_them(
    model: str, packs: dict[str, Path], families: Path, tmp_path: Path
) -> None:
    path = families if model == "families" else packs[model]
    export_gguf(path, tmp_path / "m.gguf")
    with moepack.open(path) as pack, pack.reader() as reader:
        layout = lay_out(pack, PAGE)
        length = align(layout.length - layout.experts_offset, PAGE)
        below = np.frombuffer(mmap.mmap(-1, length), np.uint8)
        memory = ExpertMemory(below.ctypes.data, length)
        found = find_places(pack, layout)
        for family, places in found.items():
            bring(reader, memory, places, list(places), family)
        layers = {key.layer for places in found.values() for key in places}
    brought = bytes(below)
    whole = (tmp_path / "m.gguf").read_bytes()[layout.experts_offset :].ljust(length, b"\0")
    if model == "families":
        assert set(found) == {"ffn_exps", "ffn_chexps", "attn_v_exps"}
        assert layers == {0, 1}, "llama.cpp does not run layers of MTP"
        end = sum(length_of(one) for places in found.values() for one in places.values())
        assert np.count_nonzero(below) > end // 2
        for places in found.values():
            for spans in places.values():
                for offset, count in spans.values():
                    assert brought[offset : offset + count] == whole[offset : offset + count]
    else:
        assert brought == whole


def test_experts_that_are_tensors_of_their_own_are_refused(tmp_path: Path) -> None:
    pack_model([legacy().write(tmp_path / "m.gguf")], tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack, pytest.raises(PackError, match="of its own"):
        find_places(pack, lay_out(pack, PAGE))
