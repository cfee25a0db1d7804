"""Hostile layouts: each rule broken alone, giants, damage."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.common import extras
from moepack.common.errors import RequestError
from moepack.packing.plan import layout
from tests.support.hostile_input import EFFORTS, assert_cheap, assert_clear, filled, mutants

SHIPPED = {
    name: (extras.folder("layouts") / f"{name}.toml").read_bytes() for name in layout.names()
}


def edited(old: str, new: str, *, name: str = "layers") -> bytes:
    """Return a shipped layout with one text replaced."""
    text = SHIPPED[name].decode()
    assert old in text
    return text.replace(old, new, 1).encode()


def named(name: str) -> bytes:
    return edited('"experts-{layer:05}.bin"', json.dumps(name))


def sized(length: str) -> bytes:
    return edited('"4 GiB"', length, name="hot-first")


def aligned(length: str) -> bytes:
    return edited('alignment = "4 KiB"', f"alignment = {length}")


PROJECTIONS = '["gate_up", "gate", "up", "down", "attn_v"]'
BAD_LAYOUTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "files: missing"),
    "not TOML": (b"<html>", "not TOML"),
    "not UTF-8": (b'description = "\xff"', "not TOML"),
    "NUL": (b"\0" * 100, "not TOML"),
    "too long": (b"#" * (layout.MAX_FILE_LENGTH + 1), "too long"),
    "deep lists": (b"a = " + b"[" * 5000, "not TOML"),
    "a key twice": (edited("[files]", "[files]\n[files]"), "not TOML"),
    "an unknown key": (b"extra = 1\n" + SHIPPED["layers"], "extra: unknown key"),
    "an unknown key of two lines": (b'"a\\nb" = 1\n' + SHIPPED["layers"], "unknown key"),
    "an unknown key inside": (edited("[blobs]", "[blobs]\nextra = 1"), "blobs.extra': unknown key"),
    "no description": (edited("description", "# description"), "description: missing"),
    "a long description": (edited("one file a layer, h", "h" * 300), "description: not a line"),
    "no files": (edited("[files]", "[other]"), ""),
    "files as a number": (b"files = 1", "files: missing, or not a table"),
    "an unknown group": (edited('"layer"', '"expert"'), "files.group: unknown value"),
    "an unknown order": (edited('"hotness"', '"heat"'), "blobs.order: unknown value"),
    "no order": (edited("order =", "# order ="), "blobs.order: missing"),
    "a class in the name": (named("{layer.__class__}.bin"), "files.name: wrong placeholders"),
    "a conversion in the name": (named("{layer!r}.bin"), "files.name: wrong placeholders"),
    "a wide number in the name": (named("{layer:099999999}.bin"), "files.name: wrong placeholders"),
    "an open brace in the name": (named("{layer}{.bin"), "files.name: wrong placeholders"),
    "no number in the name": (named("experts.bin"), "files.name: wrong placeholders"),
    "the other number": (named("{number}.bin"), "files.name: wrong placeholders"),
    "a name upwards": (named("../{layer}.bin"), "files.name: not a plain file name"),
    "a name with NUL": (named("a\0{layer}.bin"), "files.name: not a line of text"),
    "a long name": (named("x" * 120 + "{layer}.bin"), "files.name: not a plain file name"),
    "another ending": (named("{layer}.json"), "files.name: not a plain file name"),
    "a length by layer": (
        edited("[blobs]", "max_length = 1\n[blobs]"),
        "files.max_length: belongs",
    ),
    "no length by size": (
        edited("max_length", "# max", name="hot-first"),
        "files.max_length: belongs",
    ),
    "a length of 0": (sized("0"), "files.max_length: out of bounds"),
    "a length of 2^63": (sized(str(1 << 63)), "files.max_length: out of bounds"),
    "a length of 2^9999": (sized(hex(1 << 9999)), "files.max_length: out of bounds"),
    "a length in TiB": (sized('"999999999999999999 TiB"'), "files.max_length: too large a size"),
    "a length of 21 digits": (sized('"100000000000000000000"'), "files.max_length: not a size"),
    "a length of true": (sized("true"), "files.max_length: not a line of text"),
    "alignment 3": (aligned("3"), "blobs.alignment: not an alignment"),
    "alignment -4096": (aligned("-4096"), "blobs.alignment: not an alignment"),
    "alignment 2^31": (aligned('"2 GiB"'), "blobs.alignment: not an alignment"),
    "alignment 2^9999": (aligned(hex(1 << 9999)), "blobs.alignment: not an alignment"),
    "blobs below parts": (aligned('"1 KiB"'), "parts.alignment: larger than the blob's"),
    "small above parts": (edited("= 64", "= 8192"), "parts.small_alignment: larger than"),
    "no projections": (edited(PROJECTIONS, "[]"), "parts.projections: not an order"),
    "a projection twice": (edited('"gate_up"', '"gate"'), "parts.projections: not an order"),
    "projections as lists": (edited('"gate_up"', '["gate_up"]'), "parts.projections: not an order"),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_each_rule_of_a_layout_has_an_error(name: str, tmp_path: Path) -> None:
    data, words = BAD_LAYOUTS[name]
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(RequestError) as caught:
        layout.load(str(path))
    assert_clear(caught.value, path)
    assert words.replace("'", "") in str(caught.value).replace("'", "")


@pytest.mark.parametrize(
    "name", ["../layers", "none", "\0", "x" * 5000, "/etc/passwd", "/dev/null"]
)
def test_the_name_of_a_layout_is_looked_up_and_never_a_path(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        layout.load(name)
    assert len(str(caught.value)) < 500 + len(name)


LAYOUT = ("from moepack.packing.plan import layout", "layout.load(path)")


LIMIT = layout.MAX_FILE_LENGTH
BIG_LAYOUTS = {
    "dotted keys": b"a" + filled(b".a", LIMIT - 5) + b"=1",
    "dotted tables": filled(b"[a" + b".a" * 500 + b"]\n", LIMIT),
    "inline tables": b"a=[" + filled(b"{a=1},", LIMIT - 10) + b"]",
    "quotes": b'a="""' + filled(b'""x', LIMIT - 10),
    "hexadecimal": b"a=0x" + filled(b"f", LIMIT - 10),
}


@pytest.mark.parametrize("name", BIG_LAYOUTS)
def test_a_big_layout_is_refused_within_a_second_and_100_mb(name: str, tmp_path: Path) -> None:
    path = tmp_path / "big.toml"
    path.write_bytes(BIG_LAYOUTS[name])
    assert_cheap(LAYOUT, path)


LAYOUTS = st.one_of(*(mutants(data) for data in SHIPPED.values())) | st.binary(max_size=100)


def check_layout(data: bytes) -> None:
    try:
        decoded = layout.decode(data, "l.toml", "l")
    except RequestError as error:
        assert_clear(error, "l.toml")
        return
    assert decoded.small_alignment <= decoded.part_alignment <= decoded.blob_alignment <= 1 << 30
    names = {decoded.file_named(number) for number in (0, 1, 9, 10, 99999)}
    assert len(names) == 5
    assert not any("/" in name or name in ("index.bin", "manifest.json") for name in names)
    json.dumps(decoded.to_json())


@pytest.mark.parametrize("effort", EFFORTS)
def test_any_layout_is_decoded_or_refused(effort: settings) -> None:
    effort(given(LAYOUTS)(check_layout))()
