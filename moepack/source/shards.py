"""The source: all shards of one model, found from any one of them and checked against each other.

Facts of llama.cpp b11549 (llama-model-loader.cpp, llama.cpp `llama_split_path`): shards are named
`PREFIX-00001-of-0000N.gguf`; `split.no` counts from 0 (u16); `split.count` (u16) of 0 or 1 means
not split; `split.tensors.count` (i32) is the number of tensors over all shards; only the first
shard has the model's own keys. What llama.cpp does not compare is compared here: all shards must
agree.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack import path_hints
from moepack.errors import MachineError, RequestError, SourceError
from moepack.escaping import shell_word
from moepack.paths import PathOrPaths, listed
from moepack.source import gguf_header, sniff
from moepack.source.folder import HINTS, NOT_MODELS, SHARD_NAME, model_in
from moepack.source.gguf_header import GgufHeader
from moepack.source.tensor_table import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A whole model: the headers of its shards, in order."""

    shards: tuple[GgufHeader, ...]

    @property
    def architecture(self) -> str:
        """The model's `general.architecture`; empty where the file does not say."""
        value = self.value("general.architecture")
        return value if isinstance(value, str) else ""

    def value(self, key: str) -> Any:
        """Return the metadata value of `key`, None where it is absent or was not kept."""
        held = self.shards[0].metadata.get(key)
        return None if held is None else held.data

    def model_value(self, key: str) -> Any:
        """Return the metadata value of `<architecture>.key`."""
        return self.value(f"{self.architecture}.{key}")

    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (shard number, tensor) for all tensors, in file order."""
        for number, shard in enumerate(self.shards):
            for tensor in shard.tensors:
                yield number, tensor


def open_source(named: PathOrPaths) -> Source:
    """Open the model that a path or several name: any shard, a folder, or all shards in any order.

    For what a folder names see `folder.model_in`.
    Raises SourceError where shards are missing, doubled, of other models, or break the format.
    """
    paths = find_shards(named)
    if len(listed(named)) > 1:
        return _check(_in_order(_read_all(paths)))
    if SHARD_NAME.match(paths[0].name) is None:
        return _check([_read_single(paths[0])])
    return _check(_read_all(paths))


def find_shards(named: PathOrPaths) -> list[Path]:
    """Find the files of the model that `named` names, as `open_source` does, by their names alone.

    Where all shards are named, their order is kept. Raises SourceError where shards are missing.
    """
    if not listed(named):
        raise RequestError("no source given")
    for name in listed(named):
        _check_name(os.fspath(name))
    paths = [Path(path) for path in listed(named)]
    if len(paths) > 1:
        _check_list(paths)
        return paths
    _check_finished(paths[0])
    try:
        return _siblings(model_in(paths[0]) if paths[0].is_dir() else paths[0])
    except OSError as error:
        raise MachineError(f"cannot read the folder: {error.strerror}", path=paths[0]) from None


def _check_name(name: str) -> None:
    """Raise SourceError for what names no file, before a path is made of it."""
    if not name.strip() or "://" in name:
        problem = "an address, not a file" if name.strip() else "an empty name"
        hint = path_hints.missing_model_hint(name)
        raise SourceError(problem, path=name if name.strip() else None, hint=hint)


def _check_finished(path: Path) -> None:
    """Raise SourceError where a file is a download that goes on."""
    unfinished = sniff.unfinished(path) if path.is_file() else None
    if unfinished is not None:
        sign, hint = unfinished
        found = None if sign == str(path) else sign
        raise SourceError("a download that is not finished", path=path, found=found, hint=hint)


def _siblings(path: Path) -> list[Path]:
    """Return all shards of the model that has `path` for one of its shards.

    A link to one shard leads to the others, where they do not lie beside the link.
    """
    linked = _linked_shard(path)
    if linked is None:
        return _beside(path)
    try:
        beside = _beside(path) if SHARD_NAME.match(path.name) else None
    except SourceError:
        beside = None
    return beside or _siblings(linked)


def _linked_shard(path: Path) -> Path | None:
    """Return what a link leads to if that is named as a shard: the blobs of the hub are not."""
    if not path.is_symlink() or not path.exists():
        return None
    linked = path.parent / path.readlink()
    return linked if SHARD_NAME.match(linked.name) or linked.is_symlink() else None


def _beside(path: Path) -> list[Path]:
    match = SHARD_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise SourceError("a shard number out of bounds in the name", path=path)
    if not path.exists():
        raise gguf_header.missing(str(path))
    names = list(shard_names(match["prefix"], count))
    held = set(os.listdir(path.parent))
    missing = [name for name in names if name not in held]
    if missing:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise SourceError(
            f"{len(missing)} of {count} shards are missing",
            path=path.parent,
            found=f"no {shown}",
            hint="download them into the same folder, or list all files by name:"
            f" hf download OWNER/NAME --include {shell_word(_pattern(match))}"
            f" --local-dir {shell_word(str(path.parent))}",
        )
    return [path.parent / name for name in names]


def _pattern(match: re.Match[str]) -> str:
    """Return the pattern that all shards of a model have for names."""
    return f"{os.path.basename(match['prefix'])}-*-of-{match['count']}.gguf"


def shard_names(prefix: str, count: int) -> Iterator[str]:
    """Name the shards of a model split into `count`, as llama.cpp does."""
    return (f"{prefix}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))


def _check_list(paths: list[Path]) -> None:
    """Check what was listed, by the names alone."""
    folders = [path for path in paths if path.is_dir()]
    if folders:
        raise RequestError(
            "a folder among several sources", path=folders[0], hint="list files only"
        )
    for path in paths:
        if paths.count(path) > 1:
            raise SourceError("the same shard is listed twice", path=path)
    matches = [SHARD_NAME.match(path.name) for path in paths]
    prefixes = {match["prefix"] for match in matches if match}
    if len(prefixes) > 1:
        found = ", ".join(sorted(prefixes))
        raise SourceError("shards of different models", path=paths[0], found=found)


def _read_single(path: Path) -> GgufHeader:
    header = gguf_header.read(path)
    count = _split_value(header, "split.count", "u16")
    if count is not None and count > 1:
        raise SourceError(
            "one shard of several, under a name that does not say which",
            path=path,
            place="key 'split.count'",
            expected=f"a name like MODEL-00001-of-{count:05d}.gguf",
            found=path.name,
            hint="restore the name, or list all shards",
        )
    return header


def _in_order(headers: list[GgufHeader]) -> list[GgufHeader]:
    """Sort headers by the numbers that they state."""
    numbers = [_split_value(header, "split.no", "u16") or 0 for header in headers]
    by_number = dict(zip(numbers, headers, strict=True))
    for header, number in zip(headers, numbers, strict=True):
        if by_number[number] is not header:
            raise SourceError(
                "two files are the same shard",
                path=header.path,
                place="key 'split.no'",
                found=f"{number}, as {by_number[number].path}",
            )
    return [by_number[number] for number in sorted(by_number)]


def _read_all(paths: list[Path]) -> list[GgufHeader]:
    """Read all headers; say so where a later shard fits the first one's alignment only."""
    headers: list[GgufHeader] = []
    for path in paths:
        try:
            headers.append(gguf_header.read(path))
        except SourceError as error:
            if headers and _fits(path, headers[0].alignment):
                error.hint = (
                    f"the offsets fit an alignment of {headers[0].alignment}, which only the first "
                    "shard states: the file was split by gguf-py; merge and split it with "
                    "llama-gguf-split"
                )
            raise
    return headers


def _fits(path: Path, alignment: int) -> bool:
    try:
        return gguf_header.read(path, alignment=alignment).alignment == alignment
    except SourceError:
        return False


def _check(headers: list[GgufHeader]) -> Source:
    first = headers[0]
    kind = first.metadata.get("general.type")
    if kind is not None and kind.data in NOT_MODELS:
        problem, place = NOT_MODELS[str(kind.data)], "key 'general.type'"
        hint = HINTS[str(kind.data)].format(shell_word(first.path))
        raise SourceError(problem, path=first.path, place=place, hint=hint)
    count = _split_value(first, "split.count", "u16") or 0
    if count > 1 or len(headers) > 1:
        _check_shards(headers, count)
    _check_tensors(headers)
    return Source(tuple(headers))


def _check_shards(headers: list[GgufHeader], count: int) -> None:
    if count != len(headers):
        raise SourceError(
            "shards are missing, or of another model",
            path=headers[0].path,
            place="key 'split.count'",
            expected=f"{count} shards",
            found=len(headers),
        )
    for number, header in enumerate(headers):
        _expect(header, "split.no", "u16", number)
        _expect(header, "split.count", "u16", count)
        match = SHARD_NAME.match(os.path.basename(header.path))
        if match and (int(match["number"]), int(match["count"])) != (number + 1, count):
            raise SourceError(
                "the name and the header name different shards",
                path=header.path,
                place="key 'split.no'",
                expected=f"{number + 1:05d}-of-{count:05d} in the name",
                found=f"{match['number']}-of-{match['count']}",
                hint="it was renamed: restore the name, or download it again",
            )
    total = sum(len(header.tensors) for header in headers)
    for header in headers:
        _expect(header, "split.tensors.count", "i32", total)


def _expect(header: GgufHeader, key: str, type_name: str, expected: int) -> None:
    value = _split_value(header, key, type_name)
    if value != expected:
        raise SourceError(
            "the shards do not fit together",
            path=header.path,
            place=f"key {key!r}",
            expected=expected,
            found="no such key" if value is None else value,
        )


def _split_value(header: GgufHeader, key: str, type_name: str) -> int | None:
    value = header.metadata.get(key)
    if value is None:
        return None
    if value.type_name != type_name or not isinstance(value.data, int):
        raise SourceError(
            "wrong type", path=header.path, place=f"key {key!r}", expected=type_name,
            found=value.type_name,
        )  # fmt: skip
    return value.data


def _check_tensors(headers: list[GgufHeader]) -> None:
    seen: dict[str, str] = {}
    for header in headers:
        for tensor in header.tensors:
            other = seen.setdefault(tensor.name, header.path)
            if other is not header.path:
                raise SourceError(
                    "stands in two shards",
                    path=header.path,
                    place=f"tensor {tensor.name!r}",
                    found=f"also in {other}",
                )
