"""The conformance files: they are what scripts make, and moepack gives them their verdicts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from conformance import make_traces
from moepack.errors import TraceError
from moepack.trace.compressed import TraceStream
from moepack.trace.file import CUT, FileReader
from moepack.trace.formats import registry
from moepack.trace.model import Counts, Items, Origin
from moepack.trace.summary import TraceCounter
from moepack.trace.validation import Checks
from tests.support.frozen import contents, digest_of_all

TRACES = make_traces.FOLDER
VERDICTS: list[dict[str, Any]] = json.loads((TRACES / "verdicts.json").read_text())

FROZEN = "ec8cd8284972c15b3696ce6535f0517b91a1138b98d60fa8ccc56a1aa8e3a1d1"


REFUSALS = {
    "empty": "no selections in it",
    "header": "not a trace file, expected MOETRACE",
    "magic": "not a trace file, expected MOETRACE",
    "version": "of another version, expected 1, found 2",
    "zeros": "byte 12: not zero",
    "after-the-end": "something follows the end",
    "joined": "something follows the end",
    "no-origin": "a record before any origin",
    "optional-first": "a record before any origin",
    "end-alone": "a record before any origin",
    "unknown-kind": "a record of kind 77, which",
    "kind-zero": "a record of kind 0, which",
    "known-kind-optional": "a record of kind 2 cannot be optional",
    "flags": "unknown flags, expected 0 or 1, found 3",
    "no-selections": "no selections in it",
    "stored-length": "stored length out of bounds",
    "length": "record at byte 194: length out of bounds",
    "frame": "no zstd frame, expected 28 b5 2f fd, found 00 b5 2f fd",
    "window": "the window of its frame out of bounds, expected <= 67,108,864, found 134,217,728",
    "window-of-a-short-frame": "the window of its frame out of bounds, expected <= 67,108,864",
    "dictionary": "its frame needs a dictionary, expected none, found 7",
    "reserved-bit": "damaged: ",
    "checksum": "damaged: ",
    "content-size": "its frame has another length, expected 21, found 22",
    "skippable-frame": "a skippable frame, expected 28 b5 2f fd, found 50 2a 4d 18",
    "skippable-frame-first": "a skippable frame, expected 28 b5 2f fd, found 50 2a 4d 18",
    "skippable-frame-last": "something follows its frame",
    "two-frames": "something follows its frame",
    "after-the-frame": "something follows its frame",
    "frame-cut": "its frame has no end",
    "frame-too-short": "its frame has another length, expected 22, found 21",
    "frame-too-long": "its frame has another length, expected 20, found 21",
    "length-beyond-the-file": "damaged: its frame ends early",
    "cut-kind": "a record of kind 77, which",
    "cut-known-kind-optional": "a record of kind 2 cannot be optional",
    "cut-flags": "unknown flags, expected 0 or 1, found 3",
    "cut-stored-length": "stored length out of bounds",
    "cut-length": "length out of bounds",
    "cut-frame": "no zstd frame, expected 28 b5 2f fd, found 28 b5 2e",
    "cut-skippable-frame": "a skippable frame, expected 28 b5 2f fd, found 50 2a 4d 18",
    "cut-window": "the window of its frame out of bounds",
    "cut-dictionary": "its frame needs a dictionary, expected none, found 7",
    "cut-reserved-bit": "damaged: ",
    "cut-content-size": "its frame has another length, expected 21, found 22",
    "cut-block": "damaged: ",
    "cut-too-long": "its frame has another length, expected 21, found more than 21",
    "digest": "it does not have its digest",
    "digest-of-an-optional-record": "it does not have its digest",
    "origin-length": "the length of an origin out of bounds",
    "origin-encoding": "not JSON: 'utf-8' codec",
    "origin-json": "not JSON: Expecting",
    "origin-mark": "not JSON: Unexpected UTF-8 BOM",
    "origin-nan": "not JSON: NaN",
    "origin-infinity": "not JSON: -Infinity",
    "origin-high-number": "not JSON: 9223372036854775808 is beyond all numbers",
    "origin-low-number": "not JSON: -9223372036854775809 is beyond all numbers",
    "origin-long-number": "000 is beyond all numbers",
    "origin-double": "not JSON: 1e309 is beyond all numbers",
    "origin-negative-double": "not JSON: -1.8e308 is beyond all numbers",
    "origin-depth": "not JSON: it is nested more than 64 levels deep",
    "origin-surrogate-in-a-value": "not JSON: a text has half of a surrogate pair",
    "origin-surrogate-in-a-key": "not JSON: a text has half of a surrogate pair",
    "origin-surrogate-encoded": "not JSON: 'utf-8' codec",
    "origin-array": "not a JSON object",
    **{f"origin-without-{key.replace('_', '-')}": f'no "{key}"' for key in make_traces.KEYS},
    "origin-format": '"format" is not text',
    "origin-name": '"name" is not text, found None',
    "origin-surrogate": "not JSON: a text has half of a surrogate pair",
    "origin-model": '"model" is not text',
    "origin-family": "of a family that is not known, expected ffn_exps, found ffn_up",
    "origin-unknown": '"unknown" is not a list',
    "origin-unknown-word": "not known, or one twice, found weather",
    "origin-unknown-twice": "not known, or one twice, found phases",
    "origin-token-count": '"token_count" out of bounds',
    "origin-token-count-float": '"token_count" out of bounds',
    "origin-token-count-exponent": '"token_count" out of bounds',
    "origin-token-count-true": '"token_count" out of bounds',
    "origin-expert-counts": '"expert_counts" has no layers, found [4]',
    "origin-no-layers": '"expert_counts" has no layers, found {}',
    "origin-layer": "has a layer that is none, expected 0 to 65535, found 65536",
    "origin-layer-zeros": "has a layer that is none, expected 0 to 65535, found 00",
    "origin-no-experts": '"expert_counts" of layer 3 out of bounds',
    "origin-many-experts": '"expert_counts" of layer 0 out of bounds',
    "origin-experts-used": '"experts_used" out of bounds',
    "tokens-head": "too short",
    "tokens-length": "the payload has another length, expected 21, found 22",
    "tokens-none": "tokens without any",
    "tokens-empty": "a token without selections",
    "tokens-sum": "do not add up, expected 1, found 2",
    "tokens-phase": "a phase that is none",
    "requests-fall": "requests that fall",
    "requests-fall-between-records": "requests that fall from one record to the next",
    "expert-twice": "an expert twice in one layer of a token",
    "layer-unknown": "expected 0 experts in layer 1, found layer 1 expert 0",
    "expert-unknown": "expected 2 experts in layer 3, found layer 3 expert 2",
    "counted-expert-unknown": "expected 4 experts in layer 0, found layer 0 expert 4",
    "expert-beyond-expert-count": "found layer 0 expert 3",
    "expert-beyond-the-lower-count": "found layer 0 expert 3",
    "too-many-used": "more experts in one layer of a token than the file says",
    "counts-length": "the payload has another length, expected 20, found 19",
    "counts-none": "counts without any",
    "counts-phase": "a phase that is none",
    "counts-zero": "a count out of bounds",
    "counts-large": "a count out of bounds",
    "end-records": "its record count is not that of the file",
    "end-tokens": "its token count is not that of the file",
    "end-selections": "its selection count is not that of the file",
    "end-chain": "its chain is not that of the file",
    "end-length": "the payload has another length, expected 32, found 24",
    "record-exchanged": "its chain is not that of the file",
}
"""What moepack says of each broken file, so that none is refused for another reason."""


def names(verdict: str) -> list[str]:
    return [facts["file"] for facts in VERDICTS if facts["verdict"] == verdict]


def test_the_files_are_what_the_script_makes(tmp_path: Path) -> None:
    make_traces.make(tmp_path)
    traces = contents(TRACES)
    assert contents(tmp_path) == traces
    assert sum(map(len, traces.values())) < 100_000


def test_no_trace_ever_changes() -> None:
    """What is here is what version 1 of the trace file is; new traces need a new digest."""
    assert digest_of_all(TRACES) == FROZEN


def test_there_are_files_of_all_kinds() -> None:
    found = Counter(facts["verdict"] for facts in VERDICTS)
    assert found.keys() == {"sound", "cut", "broken"}
    assert all(facts["breaks"] for facts in VERDICTS if facts["verdict"] != "sound")
    reasons = [facts["breaks"] for facts in VERDICTS if facts["breaks"]]
    assert len(set(reasons)) == len(reasons)


def test_the_frame_that_zstd_made_holds_what_it_says() -> None:
    payload = make_traces.tokens_payload(make_traces.TWO.tokens)
    assert zstandard.decompress(make_traces.PACKED, max_output_size=1000) == payload


def facts_of(items: Items, name: str) -> dict[str, Any]:
    """Say of what was read what the verdicts say."""
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
    assert facts_of(registry.read(path, checks), name) == expected(name)
    assert not checks.warnings


@pytest.mark.parametrize("name", names("cut"))
def test_a_cut_trace_is_named_and_usable_up_to_there(name: str) -> None:
    path = str(TRACES / name)
    with pytest.raises(TraceError, match="the file has no end: it was cut, or is still being"):
        list(registry.read(path, Checks(path)))
    checks = Checks(path)
    with TraceStream(path) as stream:
        reader = FileReader(stream, checks)
        assert facts_of(reader.items(), name) == expected(name)
    assert not reader.is_whole
    if expected(name)["tokens"]:
        checks = Checks(path, lenient=True)
        assert facts_of(registry.read(path, checks), name) == expected(name)
        assert checks.warnings == {CUT: 1}


@pytest.mark.parametrize("name", names("broken"))
def test_a_broken_trace_is_refused(name: str) -> None:
    path = str(TRACES / name)
    with pytest.raises(TraceError) as caught:
        list(registry.read(path, Checks(path), "moepack"))
    assert "no end: it was cut" not in caught.value.problem
    assert caught.value.path == path
    assert REFUSALS[name.removeprefix("broken-").removesuffix(".moetrace")] in str(caught.value)
