"""The tokens of traces in every format, many at a time and one by one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import moepack
from moepack.errors import RequestError, TraceError
from moepack.trace.formats.routing import Routing, Token
from moepack.trace.model import Phase
from tests.support.models import FIXTURES, REAL_MODELS, first_shard
from tests.support.trace_forms import ALL, BIG, FEW, SMALL, npy, pieces_of
from tests.support.trace_samples import Selections, seen, traces

PHASES = {None: Phase.UNKNOWN, "prefill": Phase.PREFILL, "decode": Phase.DECODE}
TRACE = FIXTURES / "qwen3moe-trace.csv"


def selections_of(layers: NDArray[Any], experts: NDArray[Any]) -> Selections:
    """List the selections of some rows."""
    return [
        (layer, expert)
        for layer, row in zip(layers.tolist(), experts.tolist(), strict=True)
        for expert in row
        if expert >= 0
    ]


def token_of(token: Token) -> tuple[int, int, Selections]:
    """Return a token as the samples have it: its request, its phase, its selections."""
    return token.request or 0, PHASES[token.phase], selections_of(token.layers, token.experts)


def tokens_in(batch: Routing) -> list[tuple[int, int, Selections]]:
    """Return the tokens of a batch as the samples have them, from its arrays."""
    return [
        (
            0 if batch.request is None else int(batch.request[start]),
            int(batch.phase[start]),
            selections_of(batch.layer[start:end], batch.experts[start:end]),
        )
        for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True)
    ]


@pytest.mark.parametrize("name", ALL)
@FEW
@given(data=st.data(), length=st.integers(1, 300))
def test_the_tokens_of_every_format_are_those_that_were_written(
    name: str, data: st.DataObject, length: int, tmp_path: Path
) -> None:
    sample = ALL[name]
    trace = data.draw(traces(sample.numbered))
    path = tmp_path / "trace"
    path.write_bytes(sample.write(trace))
    expected = sample.keeps(trace)
    opened = moepack.open_trace(path)
    with pieces_of(length):
        if not expected.tokens:
            with pytest.raises(TraceError, match="no tokens in it") as refused:
                next(opened.tokens())
            assert "only counts are known" in (refused.value.hint or "")
            return
        batches = list(opened.batches())
        tokens = list(opened.tokens())
    assert [token for batch in batches for token in tokens_in(batch)] == expected.tokens
    assert [token_of(token) for token in tokens] == expected.tokens
    assert opened.unknown == sample.unknown
    assert opened.counted_selections == expected.counts.total()
    has_requests = "requests" not in sample.unknown
    assert all((batch.request is not None) == has_requests for batch in batches)
    assert all((token.request is not None) == has_requests for token in tokens)
    expected_positions, last = [], None
    for request, _, _ in expected.tokens:
        expected_positions.append(0 if request != last else expected_positions[-1] + 1)
        last = request
    assert [token.position for token in tokens] == expected_positions


def test_a_batch_has_one_row_for_each_layer_of_each_token(tmp_path: Path) -> None:
    experts = np.random.default_rng(1).integers(0, 99, (500, 3, 1)) + np.arange(4) * 100
    path = tmp_path / "t.npy"
    path.write_bytes(npy(experts.astype(np.uint16)))
    with pieces_of(1000):
        batches = list(moepack.open_trace(path).batches())
    assert len(batches) > 1
    found = [batch.experts.reshape(len(batch.starts) - 1, 3, 4) for batch in batches]
    assert np.array_equal(np.concatenate(found), experts)
    assert [n for batch in batches for n in batch.position.tolist()] == [
        n // 3 for n in range(1500)
    ]
    assert all(batch.layer.tolist() == [0, 1, 2] * (len(batch.starts) - 1) for batch in batches)
    for token, rows in zip(batches[0].tokens(), found[0], strict=True):
        assert np.array_equal(token.experts, rows)
        assert np.shares_memory(token.experts, batches[0].experts)


def test_layers_that_a_token_lacks_have_no_row_and_experts_that_it_lacks_are_minus_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t"
    path.write_text("0 3 7 9\n0 5 1\n1 5 2\n")
    first, second = moepack.open_trace(path).tokens()
    assert first.layers.tolist() == [3, 5]
    assert first.experts.tolist() == [[7, 9], [1, -1]]
    assert (second.layers.tolist(), second.experts[:, 0].tolist()) == ([5], [2])
    assert (second.request, second.position, second.phase) == (None, 1, None)


def test_requests_are_numbered_over_all_files_and_positions_begin_again(tmp_path: Path) -> None:
    first, second = seen(SMALL).tokens, seen(BIG).tokens
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, trace in zip(paths, (SMALL, BIG), strict=True):
        path.write_bytes(ALL["moepack"].write(trace))
    tokens = list(moepack.open_trace(paths).tokens())
    assert len(tokens) == len(first) + len(second)
    requests = [token.request for token in tokens]
    assert requests[len(first)] == requests[len(first) - 1] + 1  # type: ignore[operator]
    assert tokens[len(first)].position == 0


def test_a_trace_of_another_model_is_refused() -> None:
    shard = first_shard("qwen3moe")
    for model in (shard, str(shard), [shard], moepack.shape_of(shard)):
        trace = moepack.open_trace(TRACE, model=model)
        assert len(list(trace.tokens())) == 192
        assert trace.expert_counts == {0: 16, 1: 16}
    wrong = moepack.open_trace(TRACE, model=first_shard("mixtral"))
    with pytest.raises(TraceError, match="the model has no such expert"):
        list(wrong.tokens())


def test_what_is_left_out_is_counted_anew_by_each_reading(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(ALL["moepack"].write(BIG)[:-30])
    with pytest.raises(TraceError, match="the file has no end"):
        list(moepack.open_trace(path).tokens())
    trace = moepack.open_trace(path, options=moepack.ReadOptions(lenient=True))
    for _ in range(2):
        list(trace.tokens())
        assert sum(trace.warnings.values()) == 1


def test_the_same_file_twice_is_refused() -> None:
    trace = moepack.open_trace([TRACE, TRACE])
    with pytest.raises(RequestError, match="its selections came already"):
        list(trace.tokens())


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    array = np.zeros((400_000, 24, 8), np.uint16)
    array[:] = np.arange(8)
    path = tmp_path / "t.npy"
    path.write_bytes(npy(array))
    code = f"""
import resource, moepack
trace = moepack.open_trace({str(path)!r})
next(trace.batches())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(len(batch.starts) - 1 for batch in trace.batches())
assert count == 400_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 60_000, "KiB more than after the first batch"


@pytest.mark.parametrize("model", REAL_MODELS)
def test_the_shape_of_a_model_is_found_however_it_is_named(
    model: str, packs: dict[str, Path]
) -> None:
    of_source = moepack.shape_of(first_shard(model))
    with moepack.open(packs[model]) as pack:
        assert moepack.shape_of(packs[model]) == moepack.shape_of(pack) == pack.shape
    assert moepack.shape_of(of_source) is of_source
    assert of_source.experts_used is not None
    assert of_source.dense_length is not None
