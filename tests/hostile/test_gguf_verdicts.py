"""llama.cpp's verdict on malformed headers is the yardstick: what it refuses, moepack refuses.

Where the two differ, the case stands in a list here, with the reason.
"""

from pathlib import Path

import pytest

from moepack.errors import SourceError
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
# The same for mutants, by moepack's problem.
STRICTER_PROBLEMS = {
    "not UTF-8": NAME,
    "not a name for a tensor: empty, with NUL, or a path upwards": NAME,
    "the file ends inside the tensor": DATA,
    "bytes follow the last tensor": STRICTER["bytes behind"],
}


def ours(path: Path) -> SourceError | None:
    """Return moepack's verdict: None where it accepts."""
    try:
        gguf_header.read(path)
    except SourceError as error:
        return error
    return None


def written(folder: Path, contents: list[bytes]) -> list[Path]:
    paths = [folder / f"{number}.gguf" for number in range(len(contents))]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    return paths


def test_of_the_broken_files_llama_cpp_takes_those_that_are_listed(tmp_path: Path) -> None:
    paths = written(tmp_path, [broken.data for broken in BROKEN])
    assert all(map(ours, paths))
    theirs = llama_cpp.accepts_headers_isolated(paths)
    taken = {broken.name for broken, accepts in zip(BROKEN, theirs, strict=True) if accepts}
    assert taken == set(STRICTER)


def bases() -> list[GgufBuilder]:
    """Return sound headers with everything that a header may have."""
    rich = small().put("general.alignment", "u32", 32).put("words", "arr:str", ["a", "bc", ""])
    rich.put("scores", "arr:f32", [0.5, 1.0]).put("flag", "bool", True).put("n", "u64", 1 << 40)
    old = moe((0,), 2, ne=(32, 32))
    old.version = 2
    no_tensors = GgufBuilder().put("general.architecture", "str", "m").put("split.no", "u16", 0)
    scalars = GgufBuilder().tensor("scalar", (), F32, 4).tensor("none", (4, 0), F32, 16)
    return [rich, old, no_tensors, scalars]


def test_both_take_what_is_sound(tmp_path: Path) -> None:
    paths = written(tmp_path, [base.bytes() for base in bases()])
    assert [ours(path) for path in paths] == [None] * len(paths)
    assert llama_cpp.accepts_headers_isolated(paths) == [True] * len(paths)


def mutants(first: int = 0, count: int = MUTANT_COUNT) -> list[bytes]:
    """Return damaged headers, the same in each run."""
    sound = [(base.bytes(), len(base.header())) for base in bases()]
    return [
        mutate(sound[seed % len(sound)][0], random_edits(seed, sound[seed % len(sound)][1]))
        for seed in range(first, first + count)
    ]


def knows_all_types(path: Path) -> bool:
    """Say whether a sound header has llama.cpp's types alone; moepack knows ik_llama.cpp's too."""
    return {t.type_id for t in gguf_header.read(path).tensors} <= set(llama_cpp.type_ids())


def test_no_mutant_that_llama_cpp_refuses_or_dies_of_is_taken(tmp_path: Path) -> None:
    paths = written(tmp_path, mutants())
    theirs = llama_cpp.accepts_headers_isolated(paths)
    laxer = [p for p, accepts in zip(paths, theirs, strict=True) if not accepts and ours(p) is None]
    assert not [path for path in laxer if knows_all_types(path)]
    assert theirs.count(True) > 50
    assert len(theirs) - theirs.count(True) > 200


@pytest.mark.slow
def test_none_of_many_mutants_is_taken_that_llama_cpp_refuses(tmp_path: Path) -> None:
    paths = written(tmp_path, mutants(MUTANT_COUNT, 50_000))
    for start in range(0, len(paths), MUTANT_COUNT):
        group = paths[start : start + MUTANT_COUNT]
        theirs = llama_cpp.accepts_headers_isolated(group)
        laxer = [p for p, taken in zip(group, theirs, strict=True) if not taken and not ours(p)]
        assert not [path for path in laxer if knows_all_types(path)]


def test_a_mutant_that_moepack_alone_refuses_is_refused_for_a_reason(tmp_path: Path) -> None:
    paths = written(tmp_path, mutants())
    theirs = llama_cpp.accepts_headers_isolated(paths)
    taken = [path for path, accepts in zip(paths, theirs, strict=True) if accepts]
    errors = [error for path in taken if (error := ours(path))]
    assert {error.problem for error in errors} == set(STRICTER_PROBLEMS)


@pytest.mark.parametrize("type_id", [31, 36, 97, 144, 230, 399, 43, 12345])
def test_types_that_llama_cpp_does_not_know_are_the_only_exception(
    type_id: int, tmp_path: Path
) -> None:
    """ik_llama.cpp's files hold them, and a byte copy needs no knowledge of a type."""
    row = {31: 144, 36: 64, 97: 272, 144: 140, 230: 512, 399: 258}.get(type_id, 100)
    builder = GgufBuilder().tensor("x", (256, 64), type_id, row, tail=32 if type_id == 36 else 0)
    path = builder.tensor("y", (4,), F32, 16).write(tmp_path / "x.gguf")
    assert ours(path) is None
    assert llama_cpp.accepts_headers_isolated([path]) == [False]
    assert not knows_all_types(path)
