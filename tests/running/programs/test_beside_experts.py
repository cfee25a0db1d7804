"""The memory that llama.cpp's server takes beside experts: it is limited, and known."""

from pathlib import Path

import pytest

from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.programs import server_memory
from moepack.running.programs.server_memory import beside_length, limit_earlier_texts
from tests.support import large_models
from tests.support.needs import needs_llama
from tests.support.values import some

pytestmark = needs_llama
MIB = 1 << 20
FREE = 16 << 30


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_memory, "available_memory", lambda: FREE)


def footprint(model: str, folder: Path) -> Footprint:
    return footprint_of(large_models.write(model, folder / "m.gguf"))


def earlier_length(footprint: Footprint, *words: str) -> int:
    return beside_length(footprint, words) - some(footprint.weights.read_dense_length)


@pytest.mark.parametrize(
    ("model", "words", "limits", "length"),
    [
        ("Qwen3-30B-A3B", ["-c", "4096"], ["--cache-ram", "384"], 384),
        ("Qwen3-30B-A3B", ["-c", "32768"], ["--cache-ram", "1024"], 1024),
        ("Qwen3-30B-A3B", ["-c", "32"], ["--cache-ram", "64"], 64),
        ("Qwen3-30B-A3B", ["-c", "4096", "-cram", "0"], [], 0),
        ("Qwen3-30B-A3B", ["-c", "4096", "-cram", "-1"], [], 384),
        ("gpt-oss-120b", ["--cache-ram=100", "-np", "1"], ["--ctx-checkpoints", "32"], 244),
        (
            "Qwen3-Next-80B-A3B",
            ["-cram", "100"],
            ["--ctx-checkpoints", "3"],
            100 + 4 * 3 * 75.375,
        ),
        ("Qwen3-Next-80B-A3B", ["-cram", "0", "-np", "1", "-ctxcp", "9"], [], 9 * 75.375),
        ("Gemma-4-26B-A4B", ["-cram", "0"], ["--ctx-checkpoints", "2"], 4 * 2 * 200),
    ],
)
def test_earlier_texts_take_a_small_part_of_the_free_memory(
    model: str, words: list[str], limits: list[str], length: float, tmp_path: Path
) -> None:
    """As long as the user says nothing else, and that is counted too."""
    model_footprint = footprint(model, tmp_path)
    assert limit_earlier_texts(model_footprint, words) == limits
    assert earlier_length(model_footprint, *words, *limits) == pytest.approx(length * MIB, rel=0.01)


def test_limits_of_llama_cpp_are_counted_where_none_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_footprint = footprint("Qwen3-30B-A3B", tmp_path)
    assert earlier_length(model_footprint) == 8192 * MIB
    monkeypatch.setenv("LLAMA_ARG_CACHE_RAM", "5")
    assert limit_earlier_texts(model_footprint, []) == []
    assert earlier_length(model_footprint) == 5 * MIB
