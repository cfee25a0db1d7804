"""Layouts: named profiles that say how blobs are grouped, ordered and aligned.

A layout is a TOML file, shipped ones in `layouts/` and a user's own by path. It is checked when it
is read: a `Layout` that exists makes sense.
"""

import os
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from moepack import installed
from moepack.errors import RequestError
from moepack.format import records
from moepack.format.names import is_plain_name
from moepack.packing import codec
from moepack.packing.codec import Codec
from moepack.sizes import parse_size, size_text

MAX_FILE_LENGTH = 1 << 13
DEFAULT = "layers"

_PLACEHOLDER = re.compile(r"\{(layer|number)(?::0([1-9]))?\}", re.ASCII)
_GROUPS = {"layer": "layer", "size": "number"}
_ORDERS = ("hotness", "source")


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked layout. Lengths and alignments are bytes; FORMAT.md says what each rule does."""

    name: str
    description: str
    group: str
    file_name: str
    max_length: int | None
    order: str
    blob_alignment: int
    projections: tuple[str, ...]
    part_alignment: int
    small_alignment: int
    tensor_alignment: int
    codec: Codec | None = None

    def with_codec(self, wanted: Codec | None) -> "Layout":
        """Return the same layout with parts stored by another codec; raises RequestError."""
        changed = replace(self, codec=wanted)
        _check_codec(changed, path=None)
        return changed

    def with_alignment(self, alignment: int) -> "Layout":
        """Return the same layout with blobs, weights and dense tensors at other multiples.

        Raises RequestError for what is no alignment.
        """
        if alignment < 1 or alignment.bit_count() != 1 or alignment > records.MAX_ALIGNMENT:
            raise RequestError(
                "not an alignment",
                expected=f"a power of two up to {size_text(records.MAX_ALIGNMENT)}",
                found=f"{alignment:,} bytes",
            )
        return replace(
            self,
            blob_alignment=alignment,
            part_alignment=alignment,
            small_alignment=min(self.small_alignment, alignment),
            tensor_alignment=alignment,
        )

    def file_named(self, number: int) -> str:
        """Name the file of layer `number`, or file `number` where files are grouped by size."""
        return _PLACEHOLDER.sub(lambda match: f"{number:0{match[2] or 1}}", self.file_name)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as the manifest holds it."""
        codec_keys = {} if self.codec is None else {"codec": str(self.codec)}
        return {
            "name": self.name,
            "files": {"group": self.group, "name": self.file_name, "max_length": self.max_length},
            "blobs": {"order": self.order, "alignment": self.blob_alignment},
            "parts": {
                "projections": list(self.projections),
                "alignment": self.part_alignment,
                "small_alignment": self.small_alignment,
                **codec_keys,
            },
            "dense": {"alignment": self.tensor_alignment},
        }


def names() -> list[str]:
    """Name the shipped layouts."""
    return sorted(path.stem for path in installed.folder("layouts").glob("*.toml"))


def load(name_or_path: str | os.PathLike[str]) -> Layout:
    """Load a shipped layout by name, or any by the path of its TOML file.

    Raises RequestError where there is none, or where it breaks a rule.
    """
    name = os.fspath(name_or_path)
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
    elif name in names():
        path = installed.folder("layouts") / f"{name}.toml"
    else:
        expected = f"{', '.join(names())}, or a path ending in .toml"
        raise RequestError("no such layout", expected=expected, found=name[:80])
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_LENGTH + 1)
    except OSError as error:
        raise RequestError(f"cannot read the layout: {error.strerror}", path=path) from None
    return decode(data, str(path), path.stem)


def decode(data: bytes, path: str, name: str) -> Layout:
    """Read the bytes of a layout; `path` is for messages."""
    return _LayoutDecoder(path).decode(data, name)


def _check_codec(layout: Layout, path: str | None) -> None:
    """Raise RequestError where a layout has a codec and has its blobs at equal distances."""
    if layout.codec is not None and layout.order == "source":
        raise RequestError(
            "a codec does not go with blobs in the order of the source: engines compute where these"
            " lie by one distance, and compressed blobs differ in length",
            path=path,
            place=f"layout {layout.name}, codec {layout.codec}",
            hint="use another layout, such as layers: without hotness it has this order too",
        )


class _LayoutDecoder:
    def __init__(self, path: str) -> None:
        self.path = path

    def decode(self, data: bytes, name: str) -> Layout:
        if len(data) > MAX_FILE_LENGTH:
            self.fail("", "too long", f"up to {MAX_FILE_LENGTH:,} bytes", None)
        try:
            body = tomllib.loads(data.decode())
        except (ValueError, RecursionError) as error:
            self.fail("", f"not TOML ({str(error)[:80]})")
        self.known(body, "", ("description", "files", "blobs", "parts", "dense"))
        files = self.table(body, "files", ("group", "name", "max_length"))
        blobs = self.table(body, "blobs", ("order", "alignment"))
        part_keys = ("projections", "alignment", "small_alignment", "codec")
        parts = self.table(body, "parts", part_keys)
        dense = self.table(body, "dense", ("alignment",))
        group = self.choice(files, "files.group", tuple(_GROUPS))
        layout = Layout(
            name=name,
            description=self.text(body, "description"),
            group=group,
            file_name=self.file_name(files, group),
            max_length=self.max_length(files, group),
            order=self.choice(blobs, "blobs.order", _ORDERS),
            blob_alignment=self.alignment(blobs, "blobs.alignment"),
            projections=self.projections(parts),
            part_alignment=self.alignment(parts, "parts.alignment"),
            small_alignment=self.alignment(parts, "parts.small_alignment"),
            tensor_alignment=self.alignment(dense, "dense.alignment"),
            codec=self.codec(parts),
        )
        self.check_alignments(layout)
        _check_codec(layout, self.path)
        return layout

    def codec(self, parts: dict[str, Any]) -> Codec | None:
        if "codec" not in parts:
            return None
        text = self.text(parts, "parts.codec")
        return codec.parse(text, self.path, "parts.codec")

    def check_alignments(self, layout: Layout) -> None:
        if layout.part_alignment > layout.blob_alignment:
            expected = f"<= blobs.alignment ({layout.blob_alignment})"
            self.fail("parts.alignment", "larger than the blob's", expected, layout.part_alignment)
        if layout.small_alignment > layout.part_alignment:
            expected = f"<= parts.alignment ({layout.part_alignment})"
            found = layout.small_alignment
            self.fail("parts.small_alignment", "larger than the weights'", expected, found)

    def table(self, body: dict[str, Any], key: str, keys: tuple[str, ...]) -> dict[str, Any]:
        table = body.get(key)
        if not isinstance(table, dict):
            self.fail(key, "missing, or not a table", f"[{key}]")
        self.known(table, f"{key}.", keys)
        return table

    def known(self, table: dict[str, Any], prefix: str, keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                expected = ", ".join(prefix + known for known in keys)
                self.fail(f"{prefix}{key[:40]}", "unknown key", expected)

    def text(self, table: dict[str, Any], place: str) -> str:
        value = table.get(place.rpartition(".")[2])
        if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
            self.fail(place, "missing, or not a line of text")
        return value

    def choice(self, table: dict[str, Any], place: str, choices: tuple[str, ...]) -> str:
        value = self.text(table, place)
        if value not in choices:
            self.fail(place, "unknown value", " or ".join(choices), value)
        return value

    def size(self, table: dict[str, Any], place: str) -> int:
        value = table.get(place.rpartition(".")[2])
        if type(value) is int:
            return value
        try:
            return parse_size(self.text(table, place), least=0)
        except RequestError as error:
            self.fail(place, error.problem, error.expected, error.found)

    def alignment(self, table: dict[str, Any], place: str) -> int:
        value = self.size(table, place)
        if value < 1 or value.bit_count() != 1 or value > records.MAX_ALIGNMENT:
            found = value if abs(value) < 1 << 64 else "a huge number"
            expected = f"a power of two up to {records.MAX_ALIGNMENT}"
            self.fail(place, "not an alignment", expected, found)
        return value

    def file_name(self, files: dict[str, Any], group: str) -> str:
        name = self.text(files, "files.name")
        placeholder = _GROUPS[group]
        used = [match[1] for match in _PLACEHOLDER.finditer(name)]
        rest = _PLACEHOLDER.sub("0", name)
        if used != [placeholder] or set(rest) & {"{", "}"}:
            self.fail("files.name", "wrong placeholders", f"{{{placeholder}}} once", name)
        if not is_plain_name(rest) or len(name) > 100 or not rest.endswith(".bin"):
            self.fail("files.name", "not a plain file name ending in .bin", found=repr(name))
        if rest.lower() == "dense.bin":
            self.fail("files.name", "the dense part has this name", found=name)
        return name

    def max_length(self, files: dict[str, Any], group: str) -> int | None:
        if (group == "size") != ("max_length" in files):
            self.fail("files.max_length", 'belongs to files.group = "size", and to it alone')
        if group != "size":
            return None
        length = self.size(files, "files.max_length")
        if not 1 <= length <= records.MAX_LENGTH:
            self.fail("files.max_length", "out of bounds", f"1 to {records.MAX_LENGTH:,} bytes")
        return length

    def projections(self, parts: dict[str, Any]) -> tuple[str, ...]:
        known = {"gate_up", "gate", "up", "down", "attn_v"}
        value = parts.get("projections")
        if (
            not isinstance(value, list)
            or not all(isinstance(name, str) for name in value)
            or sorted(value) != sorted(known)
        ):
            expected = "each once: " + ", ".join(sorted(known))
            self.fail("parts.projections", "not an order of the projections", expected)
        return tuple(value)

    def fail(
        self, place: str, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise RequestError(
            problem, path=self.path, place=place or None, expected=expected, found=found
        )
