"""Layouts: named profiles of how blobs are grouped, ordered and aligned.

A layout is a TOML file, shipped ones in `layouts/` and a user's own by path. It is checked when it
is read: a `Layout` that exists makes sense.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moepack.common import extras
from moepack.common.errors import RequestError
from moepack.common.fields import Fields, parse_toml
from moepack.common.sizes import parse_size, size_text
from moepack.pack.format import records
from moepack.pack.format.contents import PROJECTIONS
from moepack.pack.format.names import is_plain_name

MAX_FILE_LENGTH = 1 << 13
_MAX_TEXT = 200
DEFAULT = "layers"
_PLACEHOLDER = re.compile(r"\{(layer|number)(?::0([1-9]))?\}", re.ASCII)
_GROUPS = {"layer": "layer", "size": "number"}
_ORDERS = ("hotness", "source")
_TABLES = {
    "files": ("group", "name", "max_length"),
    "blobs": ("order", "alignment"),
    "parts": ("projections", "alignment", "small_alignment"),
    "dense": ("alignment",),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked layout. Lengths and alignments are bytes; FORMAT.md explains each rule."""

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

    def with_alignment(self, alignment: int) -> "Layout":
        """Return the same layout with blobs, weights and dense tensors at other multiples.

        Raises RequestError for what is no alignment.
        """
        if not _is_alignment(alignment):
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
        return {
            "name": self.name,
            "files": {"group": self.group, "name": self.file_name, "max_length": self.max_length},
            "blobs": {"order": self.order, "alignment": self.blob_alignment},
            "parts": {
                "projections": list(self.projections),
                "alignment": self.part_alignment,
                "small_alignment": self.small_alignment,
            },
            "dense": {"alignment": self.tensor_alignment},
        }


def names() -> list[str]:
    """Name the shipped layouts."""
    return sorted(path.stem for path in extras.folder("layouts").glob("*.toml"))


def load(name_or_path: str | os.PathLike[str]) -> Layout:
    """Load a shipped layout by name, or any by the path of its TOML file.

    Raises RequestError if there is none, or it breaks a rule.
    """
    name = os.fspath(name_or_path)
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
    elif name in names():
        path = extras.folder("layouts") / f"{name}.toml"
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
    """Read the bytes of a layout; `path` is for messages. Raises RequestError."""
    body = Fields(parse_toml(data, path, MAX_FILE_LENGTH), "", path, RequestError)
    body.allow("description", *_TABLES)
    for table, keys in _TABLES.items():
        if not isinstance(body.body.get(table), dict):
            body.fail(table, "missing, or not a table", f"[{table}]")
        body.inner(table).allow(*keys)
    files, blobs, parts, dense = map(body.inner, _TABLES)
    group = files.choice("group", tuple(_GROUPS))
    layout = Layout(
        name=name,
        description=_line(body, "description"),
        group=group,
        file_name=_file_name(files, group),
        max_length=_max_length(files, group),
        order=blobs.choice("order", _ORDERS),
        blob_alignment=_alignment(blobs, "alignment"),
        projections=_projections(parts),
        part_alignment=_alignment(parts, "alignment"),
        small_alignment=_alignment(parts, "small_alignment"),
        tensor_alignment=_alignment(dense, "alignment"),
    )
    if layout.part_alignment > layout.blob_alignment:
        expected = f"<= blobs.alignment ({layout.blob_alignment})"
        parts.fail("alignment", "larger than the blob's", expected, layout.part_alignment)
    if layout.small_alignment > layout.part_alignment:
        expected = f"<= parts.alignment ({layout.part_alignment})"
        parts.fail("small_alignment", "larger than the weights'", expected, layout.small_alignment)
    return layout


def _is_alignment(value: int) -> bool:
    return 1 <= value <= records.MAX_ALIGNMENT and value.bit_count() == 1


def _line(table: Fields, key: str) -> str:
    text = table.line(key, _MAX_TEXT)
    if text is None:
        table.fail(key, "missing", "a line of text")
    return text


def _size(table: Fields, key: str) -> int:
    value = table.body.get(key)
    if type(value) is int:
        return value
    try:
        return parse_size(_line(table, key), least=0)
    except RequestError as error:
        table.fail(key, error.problem, error.expected, error.found)


def _alignment(table: Fields, key: str) -> int:
    value = _size(table, key)
    if not _is_alignment(value):
        number = value if abs(value) < 1 << 64 else "a huge number"
        expected = f"a power of two up to {records.MAX_ALIGNMENT}"
        table.fail(key, "not an alignment", expected, number)
    return value


def _file_name(files: Fields, group: str) -> str:
    name = _line(files, "name")
    placeholder = _GROUPS[group]
    placeholders = [match[1] for match in _PLACEHOLDER.finditer(name)]
    rest = _PLACEHOLDER.sub("0", name)
    if placeholders != [placeholder] or set(rest) & {"{", "}"}:
        files.fail("name", "wrong placeholders", f"{{{placeholder}}} once", name)
    if not is_plain_name(rest) or len(name) > 100 or not rest.endswith(".bin"):
        files.fail("name", "not a plain file name ending in .bin", None, repr(name))
    return name


def _max_length(files: Fields, group: str) -> int | None:
    if (group == "size") != ("max_length" in files):
        files.fail("max_length", 'belongs to files.group = "size", and no other')
    if group != "size":
        return None
    length = _size(files, "max_length")
    if not 1 <= length <= records.MAX_LENGTH:
        files.fail("max_length", "out of bounds", f"1 to {records.MAX_LENGTH:,} bytes")
    return length


def _projections(parts: Fields) -> tuple[str, ...]:
    names: Any = parts.body.get("projections")
    is_text = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_text or sorted(names) != sorted(PROJECTIONS):
        expected = "each once: " + ", ".join(sorted(PROJECTIONS))
        parts.fail("projections", "not an order of the projections", expected)
    return tuple(names)
