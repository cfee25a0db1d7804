"""The C reader takes the name of the index from the manifest, and refuses what is no JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moepack.common import digest
from moepack.common.fields import parse_strictly
from moepack.pack.format import manifest
from moepack.pack.format.names import is_index_name
from tests.support.broken_packs import BAD_NAMES
from tests.support.c_readers import Verdict, c_says, python_says
from tests.support.hostile_input import mutate, random_edits
from tests.support.pack_draft import sealed


def with_value(tiny: Path, value: bytes) -> bytes:
    """Return the manifest with a value for a key that nobody knows, and its digest."""
    body = body_of(tiny)
    signed = json.dumps(body, indent=2).encode().removesuffix(b"\n}") + b',\n  "odd": ' + value
    return (
        signed + f',\n  "manifest_digest": "{digest.to_text(digest.xxh3(signed))}"\n}}\n'.encode()
    )


def with_name(tiny: Path, name: object) -> bytes:
    """Return the manifest with another name of the index, and its digest."""
    body = body_of(tiny)
    body["index"]["name"] = name
    return sealed(json.dumps(body, indent=2))


def body_of(tiny: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((tiny / "manifest.json").read_bytes())
    del body["manifest_digest"]
    return body


def linked(tiny: Path, path: Path, text: bytes, index: str = "index.bin") -> Path:
    """Make a pack with another manifest, the index under that name, and no data files."""
    path.mkdir()
    (path / index).symlink_to(tiny / "index.bin")
    (path / "manifest.json").write_bytes(text)
    return path


# Values.

SOUND = [
    *(b"0", b"-0", b"12.50", b"1E-2", b"-1.5e+3", b"9223372036854775807", b"true", b"false"),
    *(b"null", b"[]", b"[ ]", b"{}", b"{ }", b'{"a" : [1 ,\t2] ,"b":{}}', b'""', b'"\x7f"'),
    *(rb'"\"\\\/\b\f\n\r\t"', rb'"\u00e9\uD83D\ude00\uffff\u0000"', '"é\U0001f600"'.encode()),
    *(b"[" * 63 + b"]" * 63, b'{"a":' * 63 + b"0" + b"}" * 63, b'"' + b"x" * 1000 + b'"'),
    *(b'{"index": {"name": "x"}}', b'{"name": "x"}', b'["name", "x"]', b'{"name": 1, "name2": 2}'),
]
BROKEN = [
    *(b"", b"01", b"-", b"+1", b"--1", b".5", b"1.", b"1.e1", b"1e", b"1e+", b"0x1", b"1 2"),
    *(b"tru", b"True", b"nul", b"NaN", b"Infinity", b"-Infinity", b"'a'", b"\x0b1", b"/**/1"),
    *(b"\xef\xbb\xbf1", b"\x001", b"1\x00", b'"a', b'"\n"', b'"\x1f"', b'"\x00"', b'"\\x"'),
    *(b'"\\', b'"\\u"', b'"\\u123"', b'"\\u12g4"', b'"\\ud800"', b'"\\udc00"', b'"\\ud800x"'),
    *(b'"\\ud800\\u0041"', b'"\\ud800\\ud800"', b'"\\ud800\\', b'"\xff"', b'"\xc0\x80"'),
    *(
        b'"\xed\xa0\x80"',
        b'"\xf4\x90\x80\x80"',
        b'"\xc3',
        b'"\xe2\x82"',
        b"[1,]",
        b"[,1]",
        b"[1 2]",
    ),
    *(b"[1", b"[", b"[1}", b"]", b"}", b'{"a":1,}', b'{,"a":1}', b'{"a"}', b'{"a" 1}', b"{a:1}"),
    *(b"{1:1}", b'{"a":}', b'{"a":1]', b'{"a":1 "b":2}', b'{"\\ud800":1}', b'{"a"::1}'),
]
TOO_DEEP = [b"[" * 64 + b"]" * 64, b'{"a":' * 64 + b"0" + b"}" * 64, b"[" * 100_000]
TWICE = [
    b'1, "index": {"name": "index.bin"}',
    b'1, "\\u0069n\\u0064ex": null',
    b'1, "index": {"name": "x", "name": "y"}',
]


Check = Callable[[list[bytes]], list[tuple[Path, Verdict]]]
"""The fixture `check`."""


@pytest.fixture
def check(tiny: Path, tmp_path: Path, program: Path) -> Check:
    """Return what the C reader says of packs with other manifests."""

    def says(texts: list[bytes]) -> list[tuple[Path, Verdict]]:
        paths = [linked(tiny, tmp_path / str(n), text) for n, text in enumerate(texts)]
        return list(zip(paths, c_says(program, "check", paths), strict=True))

    return says


def test_any_json_may_stand_beside_the_name_of_the_index(tiny: Path, check: Check) -> None:
    expected = python_says(tiny)
    for path, verdict in check([with_value(tiny, value) for value in SOUND]):
        assert verdict == python_says(path) == expected, path.name


@pytest.mark.parametrize(
    ("values", "words"),
    [(BROKEN, "not JSON"), (TOO_DEEP, "nested more than"), (TWICE, "the key stands twice")],
    ids=["broken", "too deep", "twice"],
)
def test_what_is_no_json_for_everybody_is_refused(
    values: list[bytes], words: str, tiny: Path, check: Check
) -> None:
    verdicts = check([with_value(tiny, value) for value in values])
    for value, (path, verdict) in zip(values, verdicts, strict=True):
        assert verdict.refusal.startswith("DAMAGED manifest.json: byte "), value
        assert f": {words}" in verdict.refusal, value
        assert python_says(path).refusal, value


def test_what_is_not_one_object_with_an_index_is_refused(tiny: Path, check: Check) -> None:
    index = b'{"index": {"name": "index.bin"}}'
    nothing = "index.name: expected a plain name, found none"
    later = with_value(tiny, b"[1, 2, x]")
    texts = {
        b"": "byte 0: not JSON",
        b" \n": "byte 2: not JSON",
        index + b"\0": "byte 32: not JSON",
        index + b" {}": "byte 33: not JSON",
        index[:-1]: "byte 31: not JSON",
        later: f"byte {later.index(b'x]')}: not JSON",
        b"1": nothing,
        b"[" + index + b"]": nothing,
        b'["index", {"name": "index.bin"}]': nothing,
        b'"index.bin"': nothing,
        b"{}": nothing,
    }
    *verdicts, (_, alone) = check([*texts, b" " + index + b"\n"])
    for (text, words), (_, verdict) in zip(texts.items(), verdicts, strict=True):
        assert verdict.refusal == f"DAMAGED manifest.json: {words}", text
    assert alone.refusal == ""


def test_a_manifest_has_up_to_8_mib(tiny: Path, check: Check) -> None:
    left = manifest.MAX_LENGTH - len(with_value(tiny, b""))
    values = [b'"' + b"x" * (left - 2) + b'"', b'"' + b"x" * (left - 1) + b'"']
    (_, longest), (path, longer) = check([with_value(tiny, value) for value in values])
    assert longest == python_says(tiny)
    most = manifest.MAX_LENGTH
    words = f"length: expected up to {most} bytes, found {most + 1}"
    assert longer.refusal == f"DAMAGED manifest.json: {words}"
    assert python_says(path).refusal


LEFT_TO_OTHERS = ("an object has the same key twice", "is beyond all numbers")
"""What the C reader does not look at, but for keys on the way to the name."""


def test_c_and_python_agree_on_damage_to_the_manifest(tiny: Path, check: Check) -> None:
    text = (tiny / "manifest.json").read_bytes()
    texts = [mutate(text, random_edits(seed, len(text))) for seed in range(500)]
    counts = [0, 0]
    for damaged, (_, verdict) in zip(texts, check(texts), strict=True):
        problem = problem_with(damaged)
        is_refused = verdict.refusal.startswith("DAMAGED manifest.json: ")
        assert is_refused == bool(problem) or problem.endswith(LEFT_TO_OTHERS), damaged
        counts[is_refused] += 1
    assert min(counts) > 20


def problem_with(text: bytes) -> str:
    """Return what keeps a manifest from being JSON that names an index; empty for nothing."""
    try:
        name = parse_strictly(text)["index"]["name"]
    except (ValueError, KeyError, TypeError) as error:
        return str(error) or "no name"
    return "" if isinstance(name, str) and is_index_name(name) else "not a plain name"


# Names.


def test_the_index_may_have_any_plain_name(tiny: Path, tmp_path: Path, program: Path) -> None:
    names = ["ranking-2.bin", "INDEX.BIN", "a", "9._-", "con-.x", "x" * 255, "manifest.json.x"]
    paths = [
        linked(tiny, tmp_path / str(number), with_name(tiny, name), name)
        for number, name in enumerate(names)
    ]
    text = with_value(tiny, b"0").replace(b'"name": "index', rb'"\u006eame" :"\u0069\u006Edex')
    assert b"u006eame" in text
    paths.append(linked(tiny, tmp_path / "escaped", text))
    expected = python_says(tiny)
    assert all(verdict == expected for verdict in c_says(program, "check", paths))
    assert all(python_says(path).refusal == "" for path in paths[:-1])


OTHER_NAMES: list[Any] = [
    *(name for name in BAD_NAMES.values() if name != "index.bin"),
    *("", "a\0", "index.bin\0", "\0", "\u00e4.bin", "x" * 256, "a?b", "\x7f"),
    *(None, 5, True, ["index.bin"], {"name": "index.bin"}, {}),
]


def test_other_names_are_refused(tiny: Path, check: Check) -> None:
    verdicts = check([with_name(tiny, name) for name in OTHER_NAMES])
    for name, (path, verdict) in zip(OTHER_NAMES, verdicts, strict=True):
        words = "DAMAGED manifest.json: index.name: expected a plain name, found "
        assert verdict.refusal.startswith(words), name
        assert verdict.refusal != words, name
        assert python_says(path).place == "index.name", name
