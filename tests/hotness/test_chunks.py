"""Chunk experts: each is needed once by a token that chose any of the experts that it serves."""

from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack.hotness import file, measure
from moepack.hotness.counter import SelectionCounter
from moepack.hotness.measure import measure_hotness
from moepack.hotness.model import Hotness
from moepack.keys import ExpertKey
from moepack.shape import FamilyShape, ModelShape
from moepack.trace.formats.registry import ReadOptions
from moepack.trace.model import Counts, Origin, Phase, Tokens
from tests.support.gguf_builder import Q8_0, moe

ORIGIN = Origin("test", "test")
SIZES = {0: 4, 3: 2}
MAIN = [FamilyShape(layer, "ffn_exps", 8, 1, 3) for layer in (0, 3, 5)]
CHUNKS = [FamilyShape(layer, "ffn_chexps", 8 // size, 1) for layer, size in SIZES.items()]
SHAPE = ModelShape((*MAIN, *CHUNKS))


def tokens_of(chosen: list[dict[int, list[int]]]) -> Tokens:
    """Make tokens of which each chose some experts by layer."""
    lengths = [sum(map(len, token.values())) for token in chosen]
    rows = [(layer, e) for token in chosen for layer, each in token.items() for e in each]
    layer, expert = np.array(rows, np.uint16).T
    count = len(chosen)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return Tokens(np.zeros(count, np.int64), np.zeros(count, np.uint8), starts, layer, expert)


def drawn(seed: int, count: int) -> list[dict[int, list[int]]]:
    draw = np.random.default_rng(seed)
    return [
        {layer: draw.choice(8, 3, replace=False).tolist() for layer in (0, 3, 5)}
        for _ in range(count)
    ]


def needed(chosen: list[dict[int, list[int]]]) -> dict[ExpertKey, int]:
    """Count plainly."""
    found: dict[ExpertKey, int] = {}
    for token in chosen:
        for layer, size in SIZES.items():
            for chunk in {expert // size for expert in token[layer]}:
                found[ExpertKey(layer, chunk)] = found.get(ExpertKey(layer, chunk), 0) + 1
    return found


def test_a_chunk_is_counted_once_by_a_token() -> None:
    first, second = drawn(1, 50), drawn(2, 30)
    counter = SelectionCounter(shape=SHAPE)
    counter.add(ORIGIN)
    counter.add(tokens_of(first))
    counter.add(tokens_of(second), 3.0)
    one, other = needed(first), needed(second)
    expected = {key: one.get(key, 0) + 3 * other.get(key, 0) for key in {*one, *other}}
    assert counter.chunk_counts() == expected


def test_chunks_of_counts_or_of_no_model_are_not_known() -> None:
    numbers = np.arange(2, dtype=np.uint16)
    counts = Counts(Phase.DECODE, numbers, numbers, np.array([3, 4]))
    for shape in (SHAPE, None, ModelShape(tuple(MAIN))):
        counter = SelectionCounter(shape=shape)
        counter.add(ORIGIN)
        counter.add(tokens_of(drawn(1, 5)))
        assert (counter.chunk_counts() is None) == (shape != SHAPE)
        counter.add(counts)
        assert counter.chunk_counts() is None


@pytest.mark.parametrize(
    ("token_count", "counts", "expected"),
    [
        (None, (5, 4, 0, 1), 10),
        (100, (5, 4, 0, 1), 10),
        (7, (5, 4, 0, 1), 7),
        (4, (5, 4, 0, 1), 5),  # counts with a weight above 1
        (100, (0, 0, 0, 0), 0),
    ],
)
def test_counts_alone_give_the_most_that_a_chunk_can_be_needed(
    token_count: int | None, counts: tuple[int, ...], expected: int
) -> None:
    by_expert = {ExpertKey(0, 4 + n): count for n, count in enumerate(counts)}
    by_expert |= {ExpertKey(0, 0): 1000, ExpertKey(1, 4): 1000}
    hotness = Hotness("x", by_expert, token_count, digest=0)
    assert hotness.chunk_count(0, 1, 4) == expected


def test_a_pack_states_what_a_trace_says_of_chunks(tmp_path: Path) -> None:
    builder = moe((0,), experts=8).put("qwen3moe.experts_per_group", "u32", 4)
    for name in ("up", "down"):
        builder.tensor(f"blk.0.ffn_{name}_chexps.weight", (64, 64, 2), Q8_0, 68)
    model = builder.write(tmp_path / "m.gguf")
    trace = tmp_path / "trace.csv"
    rows = ["0 1 2", "1 2 3", "0 4 7", "5 6 7"]
    lines = [f"{number},0,0,0,{row}" for number, row in enumerate(rows)]
    heading = "decode_call,token_in_call,layer,occurrence,experts"
    trace.write_text("\n".join([heading, *lines, ""]))
    shape = moepack.shape_of(model)
    measured = measure_hotness([str(trace)], options=ReadOptions(shape=shape)).hotness
    file.save(measured, tmp_path / "hot.csv")
    known = {ExpertKey(0, 0): 3, ExpertKey(0, 1): 2}
    assert measured.chunk_counts == measure.load(str(trace), shape).chunk_counts == known
    for hotness, expected in ((measured, [3, 2]), (trace, [3, 2]), (tmp_path / "hot.csv", [4, 4])):
        target = tmp_path / f"pack-{len(list(tmp_path.iterdir()))}"
        moepack.pack_model(model, target, hotness=hotness)
        with moepack.open(target) as pack:
            found = [pack.locate(0, chunk, family="ffn_chexps").hotness for chunk in (0, 1)]
        assert found == expected
        assert moepack.verify(target, model).passed
    plain = measure.load(str(tmp_path / "hot.csv"), shape)
    assert plain.counts == measured.counts
    assert plain.digest != measured.digest, "an interrupted pack must not mix the two orders"
