"""Faults in traces: each is noticed, named by its place, and left out if lenient."""

import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest

from moepack.common.errors import MoepackError, TraceError
from moepack.traces.formats import registry
from moepack.traces.formats.lines import PIECE_LENGTH
from moepack.traces.validation import Checks
from tests.support.models import first_shard
from tests.support.shapes import shape_of_counts
from tests.support.trace_samples import (
    ALL,
    DECODE,
    SMALL,
    TEXTS,
    Call,
    Seen,
    Trace,
    flat,
    pieces_of,
    read,
    refused,
    shape_of,
)

HUGE = "1" + "0" * 30
LARGE = "9223372036854775808"
"""The least number beyond 64 bits."""
OUTSIDE = ("65536", "70000", "99999")
SHAPE = shape_of(SMALL)
BAD_LINES: dict[str, tuple[str, ...]] = {
    "log": (f"layer 7 expert {HUGE}", "layer 7 expert 65536", f"layer {HUGE} expert 7",
            f"layer 7 expert {LARGE}"),
    "route-csv": (
        "0,1,0,3,0", "0,1,0,3,0,-5,0.25,1,4096", f"0,1,0,3,0,{HUGE}", "0,1,0,3,0,x", "hello",
        f"0,1,0,3,0,{LARGE},0.25,1,4096",
        "0,1,0,-3,0,5,1,1,1", "0,1,0,3,0,1.5,0.25,1,4096", "0,1,0,3,0,70000,0.25,1,4096",
        "# x".replace("#", "%"), "-1,1,0,3,0,5,0.25,1,4096",
    ),
    "call-csv": ("0,0,3,0", "0,0,3,0,", "0,0,3,0,1 -2", "0,0,3,0,1  2", "0,0,3,0,1,2", "x" * 90,
                 f"0,0,3,0,{HUGE}", f"{HUGE},0,3,0,1", "-1,0,3,0,1", "0,0,3,0,70000",
                 f"0,0,{LARGE},0,1"),
    "counts": ("1,2,-3", "1,2,nan", "1,2,1e5", "1,2,3,4", "1,-2,3", f"1,2,{HUGE}", "1,70000,2", "1",
               "1;2;3", '"1",2,3', f"1,{LARGE},3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_or_left_out_and_counted(name: str, tmp_path: Path) -> None:
    sample, path = TEXTS[name], tmp_path / "trace"
    lines = sample.write(SMALL).split(b"\n")[:-1]
    rng = random.Random(0)
    for bad in BAD_LINES[name]:
        for end, at, length in (
            (b"\n", len(lines), PIECE_LENGTH),
            (b"\r\n", rng.randrange(len(lines) // 2, len(lines)), rng.choice((7, 50))),
        ):
            if any(number in bad for number in OUTSIDE):
                at = len(lines)  # such a line may begin a token
            elif name == "log":
                at = next(n for n in range(at - 1, 0, -1) if lines[n].startswith(b"---token")) + 1
            path.write_bytes(
                b"".join(row + end for row in (*lines[:at], bad.encode(), *lines[at:]))
            )
            with pieces_of(length):
                error = refused(path, form=sample.form)
                assert error.place == f"line {at + 1}", bad
                assert all(n in str(error.found) for n in (HUGE, LARGE) if n in bad)
                _, content, warnings = read(path, lenient=True, form=sample.form)
            assert content == sample.keeps(SMALL), bad
            assert sum(warnings.values()) == 1


@pytest.mark.parametrize("name", TEXTS)
def test_a_last_line_that_is_cut_anywhere(name: str, tmp_path: Path) -> None:
    """Lines before it are read; it is reported, or reads like a whole shorter one."""
    sample, path = TEXTS[name], tmp_path / "trace"
    lines = sample.write(SMALL).rstrip(b"\n").splitlines(True)
    is_row = [line[:1] in b"01234567{lm" and line[:5] != b"main:" for line in lines]
    lines = lines[: max(n for n, row in enumerate(is_row) if row) + 1]
    path.write_bytes(b"".join(lines[:-1]))
    before = chosen(read(path)[1])
    for length in range(0, len(lines[-1]), len(lines[-1]) // 40 + 1):
        path.write_bytes(b"".join((*lines[:-1], lines[-1][:length])))
        _, content, warnings = read(path, lenient=True, form=sample.form)
        assert before <= chosen(content)
        if warnings:
            error = refused(path, form=sample.form)
            assert error.place == f"line {len(lines)}"
            assert error.problem == "the last line is cut short"
            assert warnings == {error.problem: 1}
        else:
            assert read(path, form=sample.form)[1] == content


def chosen(content: Seen) -> Counter[tuple[int, int]]:
    """Count selections of all tokens and counts."""
    pairs = Counter(pair for one in content.tokens for pair in one[2])
    for (_, layer, expert), count in content.counts.items():
        pairs[layer, expert] += count
    return pairs


def without(content: Seen, shape: dict[int, int]) -> Seen:
    """Leave out selections that a model cannot have made."""
    tokens = [
        (request, phase, [pair for pair in pairs if pair[1] < shape.get(pair[0], 0)])
        for request, phase, pairs in content.tokens
    ]
    left = [one for one in tokens if one[2]]
    order = {request: n for n, request in enumerate(dict.fromkeys(one[0] for one in left))}
    kept = {key: n for key, n in content.counts.items() if key[2] < shape.get(key[1], 0)}
    return Seen([(order[one[0]], one[1], one[2]) for one in left], Counter(kept))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "shape", [dict.fromkeys(SHAPE, 9), {n: SHAPE[n] for n in list(SHAPE)[:-1]}]
)
def test_a_trace_of_another_model(name: str, shape: dict[int, int], tmp_path: Path) -> None:
    sample, path = ALL[name], tmp_path / "trace"
    path.write_bytes(sample.write(SMALL))
    error = refused(path, shape=shape)
    assert "another model" in (error.hint or "")
    if name == "route-csv" and max(shape.values()) == 9:
        return  # it says so in front
    if name == "imatrix":
        assert refused(path, shape=shape, lenient=True).problem == error.problem
        return  # it has all experts of each layer, so another number of them is another model
    assert error.place is not None
    for length in (5, 50, PIECE_LENGTH):
        with pieces_of(length):
            assert refused(path, shape=shape).place == error.place
            _, content, warnings = read(path, shape, lenient=True)
        assert content == without(sample.keeps(SMALL), shape)
        assert set(warnings) == {"the model has no such expert"}
    if name in TEXTS:
        line = path.read_bytes().splitlines()[int(error.place.split()[1]) - 1].decode()
        assert all(number in line for number in str(error.found).split()[1::2])


@pytest.mark.parametrize("name", ["log", "log without token lines", "call-csv"])
def test_a_wrong_layer_between_others_does_not_cut_a_token(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace: Trace = [[Call(DECODE, [{1: [3], 99: [3], 2: [3]}]), Call(DECODE, [{1: [2], 2: [1]}])]]
    path.write_bytes(ALL[name].write(trace))
    _, content, warnings = read(path, {1: 4, 2: 4}, lenient=True)
    assert [one[2] for one in content.tokens] == [[(1, 3), (2, 3)], [(1, 2), (2, 1)]]
    assert warnings == {"the model has no such expert": 1}


# Encodings, compression, pickles.


def test_text_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    text = TEXTS["log"].write(SMALL).decode()
    path.write_bytes(text.encode("utf-16"))
    for form in (None, "expert-log", "counts"):
        assert "UTF-16" in refused(path, form=form).problem
    path.write_bytes(text.encode("utf-16-le"))
    assert "zero bytes" in refused(path, form="expert-log", lenient=True).problem


def test_what_is_often_taken_for_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(first_shard("mixtral").read_bytes())
    assert "imatrix" in str(refused(path).expected)
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceError, match="cannot read"):
            read(missing)


# Any damage at all.


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Change a file here and there."""
    odd = (b"9" * 30, b"-1", b"999999", b"\n\n", b"\r", b"1e5", b"nan", b"]", b"}", b" ", b",")
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(data) + 1)
        end = min(at + rng.randint(0, 9), len(data))
        new = rng.choice((*odd, b"", bytes([rng.randrange(256)]), data[at - 50 : at]))
        data = rng.choice((data[:at] + new + data[end:], data[:at] + new + data[at:], data[:at]))
    return data


SAMPLES = {name: (sample.form, sample.write(SMALL)) for name, sample in ALL.items()}


@pytest.mark.parametrize("name", SAMPLES)
def test_damage_is_an_error_and_never_a_crash(name: str, tmp_path: Path) -> None:
    form, data = SAMPLES[name]
    path = tmp_path / "trace"
    rng = random.Random(0)
    for n in range(50):
        path.write_bytes(damaged(data, rng))
        for lenient in (False, True):
            checks = Checks(str(path), shape_of_counts(SHAPE) if n % 2 else None, lenient)
            with contextlib.suppress(MoepackError):
                flat(registry.read(str(path), checks, form))


# A prompt that has no end in a log.

BEGAN, ENDED = "---began prompt processing---\n", "---ended prompt processing---\n"
PROMPT = "layer 1 expert 2\nlayer 2 expert 3\n"
NO_END = "a prompt without an end, so that its tokens are not known"


@pytest.mark.parametrize(
    ("log", "place", "instead"),
    [
        (f"x\n{BEGAN}{PROMPT}", "line 2", "the end of the file"),
        (f"{BEGAN}{PROMPT}---token 0\n{PROMPT}", "line 1", "the end of the file"),
        (f"{BEGAN}{PROMPT}{BEGAN}{PROMPT}{ENDED}", "line 1", "the next prompt, in line 4"),
        (f"{BEGAN}{PROMPT}{BEGAN}{BEGAN}", "line 1", "the next prompt, in line 4"),
        (f"{BEGAN}{ENDED}{PROMPT}\n{BEGAN}{PROMPT}", "line 6", "the end of the file"),
    ],
)
def test_a_prompt_has_an_end(log: str, place: str, instead: str, tmp_path: Path) -> None:
    """Else all that was decoded behind it would be counts of no tokens, without a word."""
    path = tmp_path / "log"
    path.write_text(log)
    for length in (1, 20, 1000):
        with pieces_of(length):
            error = refused(path)
            assert (error.problem, error.place, error.found) == (NO_END, place, instead)
            assert error.expected == ENDED.strip()
            assert "`lenient=True`" in str(error.hint)
            _, content, warnings = read(path, lenient=True)
            assert warnings == {NO_END: 1}
            assert sum(content.counts.values()) + len(content.tokens) * 2 == log.count("expert")
    path.write_text(log.replace(BEGAN, "").replace(ENDED, ""))
    assert not read(path)[1].counts, "without the line they are tokens"


def test_a_prompt_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"{BEGAN}{ENDED}{PROMPT}{BEGAN}{BEGAN}{PROMPT}{ENDED}{BEGAN}")
    _, content, warnings = read(path)
    assert (len(content.tokens), sum(content.counts.values()), warnings) == (1, 2, {})
