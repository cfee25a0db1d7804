"""The conformance traces: scripts make the same ones, and moepack gives the same verdicts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

import conformance
from conformance import make_traces
from moepack.common.errors import TraceError
from moepack.traces.compressed import TraceStream
from moepack.traces.file import CUT, FileReader
from moepack.traces.formats import registry
from moepack.traces.model import Counts, Items, Origin
from moepack.traces.steps import TraceCounter
from moepack.traces.validation import Checks
from tests.support.hostile_input import assert_clear
from tests.support.models import digest_of_all, tree

TRACES = make_traces.FOLDER
VERDICTS: list[dict[str, Any]] = json.loads((TRACES / "verdicts.json").read_text())


def names(verdict: str) -> list[str]:
    return [facts["file"] for facts in VERDICTS if facts["verdict"] == verdict]


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    make_traces.make(tmp_path)
    traces = tree(TRACES)
    assert tree(tmp_path) == traces
    assert sum(map(len, traces.values())) < 100_000


def test_no_trace_ever_changes() -> None:
    """These files define version 1 of the trace file; new traces need a new digest."""
    assert digest_of_all(TRACES) == conformance.DIGESTS["traces"]


def test_the_frame_that_zstd_made_holds_what_it_says() -> None:
    payload = make_traces.tokens_payload(make_traces.TWO.tokens)
    assert zstandard.decompress(make_traces.PACKED, max_output_size=1000) == payload


def facts_of(items: Items) -> dict[str, Any]:
    """Count items as the verdicts do."""
    counter, chosen = TraceCounter(), Counter[tuple[int, int]]()
    for item in items:
        counter.add(item)
        if isinstance(item, Origin):
            continue
        counts = item.counts if isinstance(item, Counts) else [1] * len(item.layer)
        for layer, expert, count in zip(item.layer, item.expert, counts, strict=True):
            chosen[int(layer), int(expert)] += int(count)
    return {
        "origins": len(counter.origins),
        "requests": counter.totals.request_count,
        "tokens": counter.totals.token_count,
        "selections": counter.totals.selection_count,
        "counted_selections": counter.totals.counted_selection_count,
        "chosen": [[*pair, count] for pair, count in sorted(chosen.items())],
    }


def expected(name: str) -> dict[str, Any]:
    facts = next(facts for facts in VERDICTS if facts["file"] == name)
    return {key: facts[key] for key in facts if key not in ("file", "verdict", "breaks")}


@pytest.mark.parametrize("name", names("sound"))
def test_a_sound_trace_is_read(name: str) -> None:
    path = str(TRACES / name)
    checks = Checks(path)
    assert facts_of(registry.read(path, checks)) == expected(name)
    assert not checks.warnings


@pytest.mark.parametrize("name", names("cut"))
def test_a_cut_trace_is_named_and_usable_up_to_there(name: str) -> None:
    path = str(TRACES / name)
    with pytest.raises(TraceError, match="the file has no end: it was cut, or is still being"):
        list(registry.read(path, Checks(path)))
    checks = Checks(path)
    with TraceStream(path) as stream:
        reader = FileReader(stream, checks)
        assert facts_of(reader.items()) == expected(name)
    assert not reader.is_whole
    if expected(name)["tokens"]:
        checks = Checks(path, lenient=True)
        assert facts_of(registry.read(path, checks)) == expected(name)
        assert checks.warnings == {CUT: 1}


@pytest.mark.parametrize("name", names("broken"))
def test_a_broken_trace_is_refused(name: str) -> None:
    """Each file breaks one rule alone, so that it is this rule which refuses it."""
    path = str(TRACES / name)
    with pytest.raises(TraceError) as caught:
        list(registry.read(path, Checks(path), "moepack"))
    assert "no end: it was cut" not in caught.value.problem
    assert_clear(caught.value, path)
