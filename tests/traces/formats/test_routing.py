"""The tokens of traces in every format, many at a time and one by one."""

from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack.common.errors import TraceError
from moepack.traces.file_writer import Writer
from moepack.traces.formats.routing import Token
from moepack.traces.model import Origin, Phase, Tokens
from tests.support.children import run_child
from tests.support.models import FIXTURES, first_shard
from tests.support.trace_samples import ALL, SMALL, Selections, pieces_of, seen

PHASES = {None: Phase.UNKNOWN, "prefill": Phase.PREFILL, "decode": Phase.DECODE}
TRACE = FIXTURES / "qwen3moe-trace.csv"


def token_of(token: Token) -> tuple[int, int, Selections]:
    """Return a token as the samples have it: its request, its phase, its selections."""
    rows = zip(token.layers.tolist(), token.experts.tolist(), strict=True)
    selections = [(layer, expert) for layer, row in rows for expert in row if expert >= 0]
    return token.request or 0, PHASES[token.phase], selections


@pytest.mark.parametrize("name", ALL)
def test_the_tokens_of_every_format_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    sample, path = ALL[name], tmp_path / "trace"
    path.write_bytes(sample.write(SMALL))
    expected = sample.keeps(SMALL)
    opened = moepack.open_trace(path)
    if not expected.tokens:
        with pytest.raises(TraceError, match="no tokens in it") as refused:
            next(opened.tokens())
        assert "only counts are known" in (refused.value.hint or "")
        return
    with pieces_of(50):
        tokens = list(opened.tokens())
    assert [token_of(token) for token in tokens] == expected.tokens
    assert opened.unknown == sample.unknown
    assert opened.counted_selections == expected.counts.total()
    has_requests = "requests" not in sample.unknown
    assert all((token.request is not None) == has_requests for token in tokens)
    expected_positions, last = [], None
    for request, _, _ in expected.tokens:
        expected_positions.append(0 if request != last else expected_positions[-1] + 1)
        last = request
    assert [token.position for token in tokens] == expected_positions


def test_layers_that_a_token_lacks_have_no_row_and_experts_that_it_lacks_are_minus_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t"
    heading = "decode_call,token_in_call,layer,occurrence,experts\n"
    path.write_text(f"{heading}0,0,3,0,7 9\n0,0,5,0,1\n1,0,5,0,2\n")
    first, second = moepack.open_trace(path).tokens()
    assert first.layers.tolist() == [3, 5]
    assert first.experts.tolist() == [[7, 9], [1, -1]]
    assert (second.layers.tolist(), second.experts[:, 0].tolist()) == ([5], [2])
    assert (second.request, second.position, second.phase) == (None, 1, None)


def test_requests_are_numbered_over_all_files_and_positions_begin_again(tmp_path: Path) -> None:
    first, second = seen(SMALL).tokens, seen(SMALL[:1]).tokens
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, trace in zip(paths, (SMALL, SMALL[:1]), strict=True):
        path.write_bytes(ALL["moepack"].write(trace))
    tokens = list(moepack.open_trace(paths).tokens())
    assert len(tokens) == len(first) + len(second)
    requests = [token.request for token in tokens]
    assert requests[len(first)] == requests[len(first) - 1] + 1  # type: ignore[operator]
    assert tokens[len(first)].position == 0


def test_a_trace_of_another_model_is_refused(pack: moepack.Pack) -> None:
    shard = first_shard("qwen3moe")
    for model in (shard, str(shard), [shard], moepack.shape_of(shard), pack, pack.path):
        trace = moepack.open_trace(TRACE, model=model)
        assert len(list(trace.tokens())) == 192
        assert trace.expert_counts == {0: 16, 1: 16}
    wrong = moepack.open_trace(TRACE, model=first_shard("mixtral"))
    with pytest.raises(TraceError, match="the model has no such expert"):
        list(wrong.tokens())


def test_what_is_left_out_is_counted_anew_by_each_reading(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(ALL["moepack"].write(SMALL)[:-30])
    with pytest.raises(TraceError, match="the file has no end"):
        list(moepack.open_trace(path).tokens())
    trace = moepack.open_trace(path, options=moepack.ReadOptions(lenient=True))
    for _ in range(2):
        list(trace.tokens())
        assert sum(trace.warnings.values()) == 1


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    count, layers, used = 1000, 24, 8
    layer = np.tile(np.repeat(np.arange(layers), used), count).astype(np.uint16)
    expert = np.tile(np.arange(used), count * layers).astype(np.uint16)
    columns = np.arange(count + 1) * (layers * used), layer, expert
    path = tmp_path / "trace"
    with Writer(path) as writer:
        writer.add(Origin("test", "test"))
        for number in range(12):
            request = np.full(count, number, np.int64)
            writer.add(Tokens(request, np.full(count, Phase.DECODE, np.uint8), *columns))
    code = f"""
import resource, moepack
trace = moepack.open_trace({str(path)!r})
next(trace.batches())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(len(batch.starts) - 1 for batch in trace.batches())
assert count == 12_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_child(code)) < 12_000, "KiB more than after the first batch"
