"""llama.cpp's verdict on malformed headers is the yardstick: what it refuses, moepack refuses.

Where the two differ, the case stands in a list here, with the reason.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from moepack.common.errors import SourceError
from moepack.source import gguf_header
from tests.support import llama_cpp
from tests.support.broken_ggufs import BROKEN, small
from tests.support.gguf_builder import F32, GgufBuilder, moe
from tests.support.hostile_input import mutate, random_edits
from tests.support.needs import needs_llama

pytestmark = needs_llama

MUTANT_COUNT = 2000

DATA = "llama.cpp looks at the data when it loads a model, not when it reads the header"
NAME = "moepack writes names into reports and compares them as text"
# Broken files that llama.cpp takes, and why moepack does not.
STRICTER = {
    "a long key": "no real key is longer than 100 bytes",
    "a key not in UTF-8": NAME,
    "alignment 2^31": "no disk has one, and lengths near 2^63 overflow with it",
    "no name": NAME,
    "a name with NUL": NAME + "; llama.cpp cuts it off at the NUL",
    "a name upwards": "programs that write a file for each tensor must not leave their folder",
    "a name of two dots": "as above",
    "a name upwards inside": "as above",
    "a name not in UTF-8": NAME,
    "2^63 bytes": "llama.cpp's limit is 2^64; no file system holds it, no offset is signed",
    "a tensor past the end": DATA,
    "data cut short": DATA,
    "no data at all": DATA,
    "bytes behind": "the gap to the end is the second witness of the last tensor's length",
}
# Moepack's problems with mutants that llama.cpp takes, for the same reasons.
STRICTER_PROBLEMS = {
    "not UTF-8",
    "not a name for a tensor: empty, with NUL, or a path upwards",
    "the file ends inside the tensor",
    "bytes follow the last tensor",
}


class Verdict(NamedTuple):
    """A file, and the verdicts on its header; `ours` is None if moepack takes it."""

    path: Path
    ours: SourceError | None
    is_taken: bool | None


def verdicts(folder: Path, contents: Sequence[bytes]) -> list[Verdict]:
    """Write files, and show each to both."""
    paths = [folder / f"{number}.gguf" for number in range(len(contents))]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    theirs = llama_cpp.accepts_headers_isolated(paths)
    return [Verdict(path, ours(path), good) for path, good in zip(paths, theirs, strict=True)]


def ours(path: Path) -> SourceError | None:
    try:
        gguf_header.read(path)
    except SourceError as error:
        return error
    return None


def knows_all_types(path: Path) -> bool:
    """Return whether a header has llama.cpp's types alone; moepack knows ik_llama.cpp's too."""
    return {t.type_id for t in gguf_header.read(path).tensors} <= set(llama_cpp.type_ids())


def laxer(shown: list[Verdict]) -> list[Path]:
    """List the files that moepack takes, and llama.cpp refuses or dies of, for no known reason."""
    accepted = [one.path for one in shown if not one.is_taken and one.ours is None]
    return [path for path in accepted if knows_all_types(path)]


def test_of_the_broken_files_llama_cpp_takes_those_that_are_listed(tmp_path: Path) -> None:
    shown = verdicts(tmp_path, [broken.data for broken in BROKEN])
    assert all(one.ours for one in shown)
    accepted = {broken.name for broken, one in zip(BROKEN, shown, strict=True) if one.is_taken}
    assert accepted == set(STRICTER)


def bases() -> list[GgufBuilder]:
    """Return sound headers with everything that a header may have."""
    rich = small().put("general.alignment", "u32", 32).put("words", "arr:str", ["a", "bc", ""])
    rich.put("scores", "arr:f32", [0.5, 1.0]).put("flag", "bool", True).put("n", "u64", 1 << 40)
    old = moe((0,), 2, ne=(32, 32))
    old.version = 2
    no_tensors = GgufBuilder().put("general.architecture", "str", "m").put("split.no", "u16", 0)
    scalars = GgufBuilder().tensor("scalar", (), F32, 4).tensor("none", (4, 0), F32, 16)
    return [rich, old, no_tensors, scalars]


def mutants(first: int = 0, count: int = MUTANT_COUNT) -> list[bytes]:
    """Return damaged headers, the same in each run."""
    sound = [(base.bytes(), len(base.header())) for base in bases()]
    return [
        mutate(sound[seed % len(sound)][0], random_edits(seed, sound[seed % len(sound)][1]))
        for seed in range(first, first + count)
    ]


def test_both_take_what_is_sound_and_no_mutant_is_taken_by_moepack_alone(tmp_path: Path) -> None:
    """And what moepack alone refuses, it refuses for one of the reasons above."""
    shown = verdicts(tmp_path, [*(base.bytes() for base in bases()), *mutants()])
    sound, damaged = shown[: len(bases())], shown[len(bases()) :]
    assert [(one.ours, one.is_taken) for one in sound] == [(None, True)] * len(sound)
    assert not laxer(damaged)
    assert {one.ours.problem for one in damaged if one.is_taken and one.ours} == STRICTER_PROBLEMS
    taken_count = sum(one.is_taken is True for one in damaged)
    assert taken_count > 50
    assert len(damaged) - taken_count > 200


@pytest.mark.slow
def test_none_of_many_mutants_is_taken_that_llama_cpp_refuses(tmp_path: Path) -> None:
    contents = mutants(MUTANT_COUNT, 50_000)
    for start in range(0, len(contents), MUTANT_COUNT):
        assert not laxer(verdicts(tmp_path, contents[start : start + MUTANT_COUNT]))


def test_types_that_llama_cpp_does_not_know_are_the_only_exception(tmp_path: Path) -> None:
    """ik_llama.cpp's files hold them, and a byte copy needs no knowledge of a type."""
    rows = {31: 144, 36: 64, 97: 272, 144: 140, 230: 512, 399: 258, 43: 100, 12345: 100}
    contents = []
    for type_id, row in rows.items():
        tail = 32 if type_id == 36 else 0
        builder = GgufBuilder().tensor("x", (256, 64), type_id, row, tail=tail)
        contents.append(builder.tensor("y", (4,), F32, 16).bytes())
    for path, error, is_taken in verdicts(tmp_path, contents):
        assert (error, is_taken) == (None, False)
        assert not knows_all_types(path)
