"""Read SGLANG-EXPERTPACK-v1 for `verify`, by its own index and manifest.

Written from the format's description, apart from what writes it: see `sglang`.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moepack.pack.engines import json_values
from moepack.pack.engines.contract import ExpectedPart, Exported, ExportedFile, ExportedSlice
from moepack.pack.verifying.report import Finding

_SUFFIX = ".expert-pack"
_HEADER_LENGTH, _ENTRY_LENGTH = 176, 328
_MOST_ENTRIES = 1 << 24
_ROLES = {0: "gate", 1: "up", 2: "down"}


def slices(path: Path, _expected: Sequence[ExpectedPart]) -> Iterator[Exported]:
    """Find the slices by the index of the file; `path` is the file, or its folder."""
    file = _file(path)
    with open(file, "rb") as opened:
        header = opened.read(_HEADER_LENGTH)
        if len(header) < _HEADER_LENGTH or header[:24].rstrip(b"\0") != b"SGLANG-EXPERTPACK-v1":
            yield Finding("file", "not an expert pack of SGLang", file=file.name)
            return
        version, header_length, entry_length, flags = struct.unpack_from("<4I", header, 24)
        count, data_start, alignment = struct.unpack_from("<3Q", header, 40)
        if (version, header_length, entry_length, flags) != (1, 176, 328, 3):
            yield Finding("record", "a header of another version", file=file.name)
            return
        table = opened.read(min(count, _MOST_ENTRIES) * _ENTRY_LENGTH)
    if len(table) != count * _ENTRY_LENGTH:
        yield Finding("record", "the index is cut short", file=file.name)
        return
    yield from _manifest(file, header, table)
    yield ExportedFile(file, _HEADER_LENGTH + len(table))
    for number in range(count):
        entry = table[number * _ENTRY_LENGTH : (number + 1) * _ENTRY_LENGTH]
        yield from _entry(file, entry, number, data_start, alignment)


def source_of(path: Path) -> Path | None:
    """Return the GGUF that the manifest names, if it is there."""
    try:
        named = json_values.text(
            json.loads(_manifest_of(_file(path)).read_bytes())["source"], "path"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(named) if Path(named).is_file() else None


def _file(path: Path) -> Path:
    """Return the file of experts: `path`, or the first one in that folder."""
    if not path.is_dir():
        return path
    return next(iter(sorted(path.glob(f"*{_SUFFIX}"))), path / _SUFFIX)


def _manifest_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.manifest.json")


def _entry(
    file: Path, entry: bytes, number: int, data_start: int, alignment: int
) -> Iterator[Exported]:
    layer, expert = struct.unpack_from("<2H", entry, 0)
    role = _ROLES.get(entry[4], "?")
    name = f"blk.{layer}.ffn_{role}_exps.weight"
    part = name.partition(".")[2].partition(".")[2]
    where: dict[str, Any] = {"layer": layer, "expert": expert, "part": part, "file": file.name}
    if entry[24:104].rstrip(b"\0") != name.encode():
        yield Finding("record", f"entry {number} has another tensor's name", **where)
    _, tensor_length, _, source_length, offset, length = struct.unpack_from("<6Q", entry, 104)
    if length != source_length or tensor_length % length:
        yield Finding("record", f"entry {number} has another length than its slice", **where)
    if offset < data_start or (role == "gate" and offset % alignment):
        yield Finding("record", f"entry {number} does not lie on {alignment:,}", **where)
    if entry[184:216] != entry[216:248]:
        yield Finding("record", f"entry {number} has two digests that differ", **where)
    rank = entry[5]
    yield ExportedSlice(
        layer,
        expert,
        part,
        file,
        offset,
        length,
        sha256=entry[216:248].hex(),
        type_name=entry[8:24].rstrip(b"\0").decode("ascii", "replace"),
        shape=struct.unpack_from("<4Q", entry, 248)[:rank],
    )


def _manifest(file: Path, header: bytes, table: bytes) -> Iterator[Finding]:
    path = _manifest_of(file)
    try:
        manifest = json.loads(path.read_bytes())
        model, source = manifest["model"], manifest["source"]
        entries = (manifest["pack_size"], manifest["index_sha256"], manifest["pack_path"])
        counts = (model["num_layers"], model["num_routed_experts"], model["top_k"], 3)
        identities = (model["model_identity_sha256"], source["sha256"], model["config_sha256"])
        is_complete = manifest["complete"] is True
        gguf = Path(source["path"])
        gguf_length = gguf.stat().st_size if gguf.is_file() else None
        stated_length = source["size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding("manifest", f"cannot be read: {error}", file=path.name)
        return
    actual = (file.stat().st_size, hashlib.sha256(table).hexdigest(), str(file.resolve()))
    for value, expected, what in zip(entries, actual, ("length", "index", "path"), strict=True):
        if value != expected:
            message = f"another {what} than the file's: expected {expected}, found {value}"
            yield Finding("manifest", message, file=path.name)
    if identities != tuple(header[at : at + 32].hex() for at in (80, 112, 144)):
        yield Finding("manifest", "other identities than the file's", file=path.name)
    layer_count, expert_count, *_ = in_header = struct.unpack_from("<4I", header, 64)
    if counts != in_header or layer_count * expert_count * 3 * _ENTRY_LENGTH != len(table):
        yield Finding("manifest", "other counts than the file's", file=path.name)
    if not is_complete:
        yield Finding("manifest", "the export is not complete", file=path.name)
    if gguf_length != stated_length:
        length = "no such file" if gguf_length is None else f"{gguf_length:,}"
        message = f"the GGUF {gguf} should have {stated_length:,} bytes, found {length}"
        yield Finding("manifest", message, file=path.name)
