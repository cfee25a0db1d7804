"""Hotness from traces, imatrices and hotness files, and its coverage."""

import json
import struct
from collections import Counter
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey
from moepack.inspection.describe import PackFacts
from moepack.report import model_text
from moepack.source import gguf_header
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.hotness import coverage, file, measure
from moepack.traces.hotness.measure import measure_hotness
from moepack.traces.hotness.model import Hotness
from tests.support.gguf_builder import F32, GgufBuilder, TensorSpec, moe
from tests.support.models import FIXTURES, first_shard
from tests.support.shapes import shape_of_counts

IMATRIX = FIXTURES / "qwen3moe-imatrix.gguf"
TRACE = FIXTURES / "qwen3moe-trace.csv"
SHAPE = shape_of_counts({0: 16, 1: 16})


def imatrix_of(path: Path, counts: dict[str, list[float]], **values: int) -> Path:
    """Write an imatrix with these counts, by tensor name."""
    builder = GgufBuilder().put("general.type", "str", "imatrix")
    for key, value in values.items():
        builder.put(f"imatrix.{key}", "u32", value)
    for name, numbers in counts.items():
        data = struct.pack(f"<{len(numbers)}f", *numbers)
        builder.tensors.append(TensorSpec(f"{name}.counts", (1, len(numbers)), F32, data))
    return builder.write(path)


def test_an_imatrix_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(IMATRIX.read_bytes())
    hotness = measure.load(str(path), SHAPE)
    assert hotness.origins[0]["format"] == "imatrix"
    metadata = gguf_header.read(IMATRIX).metadata
    count, size = (metadata[f"imatrix.chunk_{what}"].data for what in ("count", "size"))
    assert isinstance(count, int)
    assert isinstance(size, int)
    assert hotness.token_count == count * size
    assert hotness.request_count is None
    assert hotness.held_out is None
    assert sum(hotness.counts.values()) == hotness.token_count * 4 * len(SHAPE.layers), "4 used"


def test_a_trace_gives_what_counting_its_lines_gives() -> None:
    expected: Counter[ExpertKey] = Counter()
    later: Counter[ExpertKey] = Counter()
    rows = [line.split(",") for line in TRACE.read_text().splitlines()[1:]]
    held_out = sorted({(int(call), int(token)) for call, token, *_ in rows})[96:]
    for call, token, layer, _, experts in rows:
        keys = [ExpertKey(int(layer), int(expert)) for expert in experts.split()]
        expected.update(keys)
        later.update(keys if (int(call), int(token)) in held_out else ())
    hotness = measure.load(str(TRACE), SHAPE)
    assert hotness.counts == expected
    assert (hotness.token_count, hotness.request_count) == (192, 1)
    assert hotness.held_out == ("time", 96, later)
    assert hotness.learned() == {key: expected[key] - later[key] for key in expected}


def test_files_are_counted_together(tmp_path: Path) -> None:
    csv = tmp_path / "hot.csv"
    csv.write_text("# tokens=10\nlayer,expert,count\n0,0,100\n1,15,1\n")
    paths = [str(csv), str(IMATRIX), str(TRACE)]
    measured = measure_hotness(paths, options=ReadOptions(shape=SHAPE))
    hotness = measured.hotness
    one, two, three = (measure.load(path, SHAPE) for path in paths)
    for key in {*one.counts, *two.counts, *three.counts}:
        expected = sum(each.counts.get(key, 0) for each in (one, two, three))
        assert hotness.counts.get(key, 0) == expected
    assert hotness.token_count == 10 + (two.token_count or 0) + 192
    assert [origin["format"] for origin in hotness.origins] == ["counts", "imatrix", "call-csv"]
    assert hotness.held_out is None, "counts cannot be halved"
    assert not measured.warnings


def counts_file(path: Path, *counts: int, tokens: int = 1) -> str:
    rows = "".join(f"0,{expert},{count}\n" for expert, count in enumerate(counts))
    path.write_text(f"# tokens={tokens}\nlayer,expert,count\n{rows}")
    return str(path)


def test_what_a_pack_cannot_state_is_no_hotness(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    token = counts_file(tmp_path / "b", 1)
    all_ = counts_file(tmp_path / "c", most, tokens=most)
    assert measure_hotness([all_]).hotness.counts == {ExpertKey(0, 0): most}
    with pytest.raises(TraceError, match="counts that add up to too many") as caught:
        measure_hotness([all_, token])
    assert caught.value.expected == f"<= {most:,} in all"
    assert caught.value.path == token
    tokens = counts_file(tmp_path / "d", 2, tokens=most)
    with pytest.raises(TraceError, match="tokens that add up to too many"):
        measure_hotness([tokens, token])


def test_decode_alone_can_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "route.csv"
    rows = ["0,0,0,0,0,5", "0,0,1,0,0,6", "0,1,0,0,0,7", "0,1,1,0,0,7"]
    heading = "turn,phase,step,layer,slot,expert,weight"
    path.write_text("".join(f"{line}\n" for line in [heading, *(f"{row},1" for row in rows)]))
    assert measure_hotness([str(path)], phases="decode").hotness.counts == {(0, 7): 2}
    assert measure_hotness([str(path)]).hotness.token_count == 4
    prefill = tmp_path / "prefill.csv"
    prefill.write_text("turn,phase,step,layer,slot,expert,weight\n0,0,0,0,0,5,1\n")
    with pytest.raises(TraceError, match="nothing was counted"):
        measure_hotness([str(prefill)], phases="decode")


def test_an_imatrix_is_prefill() -> None:
    with pytest.raises(TraceError, match="nothing was counted"):
        measure_hotness([str(IMATRIX)], phases="decode")
    both, alone = (
        measure_hotness(list(map(str, paths)), phases="decode").hotness.counts
        for paths in ([IMATRIX, TRACE], [TRACE])
    )
    assert both == alone


GOOD = {"blk.0.ffn_down_exps.weight": [3.0, 1.0], "blk.0.ffn_up_exps.weight": [3.0, 1.0]}


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({"blk.0.ffn_down_exps.weight": [1.0, float("nan")]}, "not a count, of expert 1"),
        ({"blk.0.ffn_down_exps.weight": [0.5, 2.0]}, "not a count, of expert 0"),
        ({"blk.0.ffn_down_exps.weight": [2.0**25, 2.0]}, "not a count"),
        (GOOD | {"blk.0.ffn_gate_exps.weight": [2.0, 2.0]}, "its projections have other counts"),
        ({"blk.0.attn_q.weight": [3.0]}, "without counts of experts"),
        ({"blk.7.ffn_down_exps.weight": [3.0, 1.0]}, "other experts in layer 7, .* 0, found 2"),
        ({"blk.0.ffn_down_exps.weight": [1.0] * 17}, "other experts in layer 0, .* 16, found 17"),
        ({"blk.0.ffn_down_exps.weight": [1.0] * 16}, "layer 1: an imatrix of another model: it la"),
    ],
)
def test_an_imatrix_that_is_wrong_is_refused(
    counts: dict[str, list[float]], problem: str, tmp_path: Path
) -> None:
    path = imatrix_of(tmp_path / "x.gguf", counts)
    with pytest.raises(TraceError, match=problem) as caught:
        measure.load(str(path), SHAPE)
    assert caught.value.path == str(path)


# What a pack says of it


def test_coverage_is_of_the_bytes_of_the_hottest() -> None:
    lengths = {ExpertKey(0, expert): 10 for expert in range(10)}
    hotness = coverage.measure({ExpertKey(0, expert): expert for expert in range(10)}, lengths)
    assert [covered.length for covered in hotness.lengths] == [30, 60, 70, 80, 90]
    assert hotness.total_length == 100
    alike = coverage.measure({ExpertKey(0, 0): 5, ExpertKey(0, 1): 5}, lengths)
    assert alike.lengths[0].length == 10, "one of two that are alike is half"
    other = coverage.measure({ExpertKey(0, 0): 1, ExpertKey(9, 9): 99}, lengths)
    assert [covered.length for covered in other.lengths] == [None] * 5, "most was not packed"


def test_a_pack_is_ordered_by_hotness_and_says_what_covers_it(tmp_path: Path) -> None:
    target = tmp_path / "pack"
    moepack.pack_model(first_shard("qwen3moe"), target, hotness=TRACE, layout="hot-first")
    hotness = measure.load(str(TRACE))
    with moepack.open(target) as pack:
        ranked = [hotness.counts.get(key, 0) for key in pack.hottest(1 << 40)]
        assert ranked == sorted(ranked, reverse=True)
        assert pack.manifest.hotness is not None
        assert pack.manifest.hotness["token_count"] == hotness.token_count
        lengths = {key: pack.locate(*key).length for key in pack.hottest(1 << 40)}
    facts = moepack.inspect(target)
    assert isinstance(facts, PackFacts)
    assert facts.coverage == coverage.measure(hotness.counts, lengths)
    assert "by the counts that ranked them" in str(model_text.pack(facts))


def test_a_pack_without_hotness_has_no_coverage(pack: moepack.Pack) -> None:
    facts = moepack.inspect(pack.path)
    assert isinstance(facts, PackFacts)
    assert facts.coverage is None


def decoded(folder: Path, data: bytes) -> Hotness:
    path = folder / "hot.csv"
    path.write_bytes(data)
    return file.decode(path.read_bytes(), str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"0,4,1", "layer 0, expert 4: the model has no such expert"),
        (b"3,0,1", "layer 3: the model has no experts there"),
    ],
)
def test_hotness_of_another_model_is_refused(tmp_path: Path, line: bytes, message: str) -> None:
    shape = moepack.shape_of(moe().write(tmp_path / "m.gguf"))
    with pytest.raises(TraceError, match=message) as caught:
        decoded(tmp_path, line).check_fits(shape)
    assert "another model" in (caught.value.hint or "")


def test_hotness_that_was_counted_on_another_model_is_refused(tmp_path: Path) -> None:
    """Also where each of its experts is one that the model has."""
    shape = moepack.shape_of(moe((0, 1), 4).write(tmp_path / "m.gguf"))
    counts = {"0": 4, "1": 4}
    for numbers in (counts, {"1": 4}, None, "nonsense"):
        line = json.dumps({"expert_counts": numbers, "model": "Other"}).encode()
        decoded(tmp_path, b"# origin=" + line + b"\n0,1,5\n").check_fits(shape)
    for others in (counts | {"1": 2}, counts | {"2": 4}, {"0": "4"}, {"x": [4]}):
        line = json.dumps({"expert_counts": others, "model": "Other"}).encode()
        with pytest.raises(TraceError, match=r"counted on another model.*Other"):
            decoded(tmp_path, b"# origin=" + line + b"\n0,1,5\n").check_fits(shape)
