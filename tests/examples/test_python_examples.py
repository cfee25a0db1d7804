"""The examples for PyTorch and MLX give the values that Python gives."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import moepack
from moepack.common import digest
from tests.support.children import PATIENCE
from tests.support.needs import needs_library

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.long


def output_of(name: str, library: str, *arguments: object) -> list[str]:
    """Run an example; skip the test without its library."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"there is no {library} here")
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def values_of(pack: moepack.Pack, keys: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Word the values of all parts of experts as the examples do."""
    for layer, expert in keys:
        for part in pack.parts(layer):
            values = pack.tensor(layer, expert, part.name, dequantize=True)
            rows = values.shape[0] if values.ndim > 1 else 1
            shape = f"{rows} x {values.size // rows}"
            xxh3 = digest.xxh3(values.tobytes())
            yield f"layer {layer} expert {expert} {part.name}: {shape}, xxh3:{xxh3:016x}"


@needs_library
@pytest.mark.parametrize("source", ["pack", "with digests", "without"])
def test_python_computes_with_experts_where_they_are_in_memory(
    source: str, sources: dict[str, Path]
) -> None:
    with moepack.open(sources[source]) as pack, pack.reader() as reader:
        layer = pack.layers[-1]
        expected = [
            f"layer {layer} expert {expert} {part.name}: "
            f"xxh3:{digest.xxh3(reader.read(layer, expert, part.name)):016x}"
            for expert in (3, 0, 3)
            for part in pack.parts(layer)
        ]
        words = (sources[source], "1GiB", layer, 3, 0, 3)
        assert output_of("resident_experts.py", "xxhash", *words) == expected


@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss"])
def test_pytorch_reads_a_layer_ahead(model: str, packs: dict[str, Path]) -> None:
    lines = output_of("pytorch_experts.py", "torch", packs[model], 3, 0)
    with moepack.open(packs[model]) as pack:
        keys = [(layer, expert) for layer in pack.layers for expert in (3, 0)]
        # Within a layer as the drive delivers them.
        assert sorted(lines) == sorted(values_of(pack, keys))


@pytest.mark.parametrize("model", ["qwen3moe", "gpt-oss"])
def test_mlx_keeps_the_experts_that_were_used_last(model: str, packs: dict[str, Path]) -> None:
    with moepack.open(packs[model]) as pack:
        first, second, third = pack.hottest(1 << 60)[:3]
        budget = pack.hotness(*first).length + pack.hotness(*second).length
        routed = [first, third, first, second, third]
        keys = [f"{layer}:{expert}" for layer, expert in routed]
        lines = output_of("mlx_experts.py", "mlx", packs[model], budget, *keys)
        words = ("hit", "read", "hit", "read", "read")
        assert lines == [
            "2 experts are loaded",
            *(
                f"{word} {line}"
                for word, key in zip(words, routed, strict=True)
                for line in values_of(pack, [key])
            ),
        ]
