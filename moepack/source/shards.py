"""The source: all shards of one model, found by any one and checked against each other.

Facts of llama.cpp b11549 (llama-model-loader.cpp, llama.cpp `llama_split_path`): shards are named
`PREFIX-00001-of-0000N.gguf`; `split.no` counts from 0 (u16); `split.count` (u16) of 0 or 1 means
not split; `split.tensors.count` (i32) is the number of tensors over all shards; only the first
shard has the model's own keys. What llama.cpp does not compare is compared here: all shards must
agree.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from moepack.common import path_hints
from moepack.common.errors import MachineError, RequestError, SourceError
from moepack.common.escaping import shell_word
from moepack.common.paths import PathOrPaths, is_remote, path_list
from moepack.source import gguf_header, sniff
from moepack.source.folder import NOT_MODELS, SHARD_NAME, model_in, shard_names
from moepack.source.gguf_header import GgufHeader
from moepack.source.tensor_table import Tensor
from moepack.storage.inputs import Inputs


class SourceTensor(NamedTuple):
    """A tensor, and the number of the shard that holds it."""

    shard: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A whole model: the headers of its shards, in order."""

    shards: tuple[GgufHeader, ...]

    @property
    def architecture(self) -> str:
        """The model's `general.architecture`; empty if the file does not state it."""
        value = self.value("general.architecture")
        return value if isinstance(value, str) else ""

    @property
    def is_remote(self) -> bool:
        """Whether the shards are elsewhere."""
        return is_remote(self.shards[0].path)

    def value(self, key: str) -> Any:
        """Return the metadata value of `key`, None if it is absent or was not kept."""
        return self.shards[0].value(key)

    def model_value(self, key: str) -> Any:
        """Return the metadata value of `<architecture>.key`."""
        return self.value(f"{self.architecture}.{key}")

    def inputs(self) -> Inputs:
        """Return the shards, to be opened; each must be as it was when its header was read."""
        paths, stamps = [one.path for one in self.shards], [one.stamp for one in self.shards]
        return Inputs(paths, SourceError, stamps=stamps)

    def tensors(self) -> Iterator[SourceTensor]:
        """Yield all tensors, in file order."""
        for number, shard in enumerate(self.shards):
            for tensor in shard.tensors:
                yield SourceTensor(number, tensor)


def open_source(named: PathOrPaths) -> Source:
    """Open the model that a path or several name: any shard, a folder, or all shards in any order.

    One that is elsewhere has an address: see `remote_model.find_remote_shards`.

    `folder.model_in` finds the model in a folder. Raises SourceError if shards are missing,
    doubled, of other models, or break the format.
    """
    paths = find_shards(named)
    headers = [gguf_header.read(path) for path in paths]
    if len(path_list(named)) > 1:
        headers = _in_order(headers)
    elif SHARD_NAME.match(paths[0].name) is None:
        _check_single(headers[0])
    return _check(headers)


def find_shards(named: PathOrPaths) -> list[Path]:
    """Find the files of the model that `named` names, as `open_source` does, by their names alone.

    If all shards are named, their order is kept. Raises SourceError if shards are missing.
    """
    names = path_list(named)
    if not names:
        raise RequestError("no source given")
    texts = [os.fspath(path) for path in names]
    for name in texts:
        if not name.strip():  # no file, whatever a path would make of it
            raise SourceError("an empty name", hint=path_hints.missing_model_hint(name))
        if "://" in name and not is_remote(name):
            hint = path_hints.missing_model_hint(name)
            raise SourceError("an address that is not understood", path=name, hint=hint)
    if any(map(is_remote, texts)):
        if len(texts) > 1:
            hint = "name one shard: the others are found by their names"
            raise RequestError("an address among several sources", hint=hint)
        from moepack.source.remote_model import find_remote_shards  # here, since few are remote

        return [*find_remote_shards(texts[0])]
    paths = [Path(path) for path in names]
    if len(paths) > 1:
        _check_list(paths)
        return paths
    if paths[0].is_file() and (unfinished := sniff.unfinished(paths[0])) is not None:
        sign, hint = unfinished
        other = None if sign == str(paths[0]) else sign
        raise SourceError("a download that is not finished", path=paths[0], found=other, hint=hint)
    try:
        return _siblings(model_in(paths[0]) if paths[0].is_dir() else paths[0])
    except OSError as error:
        raise MachineError(f"cannot read the folder: {error.strerror}", path=paths[0]) from None


def _siblings(path: Path) -> list[Path]:
    """Return all shards of the model that has `path` for one of its shards.

    A link to one shard leads to the others, where they do not lie beside the link.
    """
    if not path.is_symlink() or not path.exists():
        return _beside(path)
    linked = path.parent / path.readlink()
    if SHARD_NAME.match(linked.name) is None and not linked.is_symlink():  # as the hub's blobs
        return _beside(path)
    try:
        beside = _beside(path) if SHARD_NAME.match(path.name) else None
    except SourceError:
        beside = None
    return beside or _siblings(linked)


def _beside(path: Path) -> list[Path]:
    match = SHARD_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise SourceError("a shard number out of bounds in the name", path=path)
    if not path.exists():
        raise gguf_header.missing(str(path))
    folder = path.parent
    names = list(shard_names(match["prefix"], count))
    present = set(os.listdir(folder))
    missing = [name for name in names if name not in present]
    if missing and not _is_split(path):
        return [path]
    if missing:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        pattern = shell_word(f"{os.path.basename(match['prefix'])}-*-of-{match['count']}.gguf")
        hint = "download them into the same folder, or list all files by name:"
        hint += f" hf download OWNER/NAME --include {pattern} --local-dir {shell_word(str(folder))}"
        problem = f"{len(missing)} of {count} shards are missing"
        raise SourceError(problem, path=folder, found=f"no {shown}", hint=hint)
    return [folder / name for name in names]


def _is_split(path: Path) -> bool:
    """Return whether the header of a file says that it is one shard of several."""
    try:
        header = gguf_header.read(path)
        return (_split_value(header, "split.count", "u16") or 0) > 1
    except SourceError:
        return True  # which shards are missing can be said without it


def _check_list(paths: list[Path]) -> None:
    """Check several paths of one model, by the names alone."""
    for path in paths:
        if path.is_dir():
            problem, hint = "a folder among several sources", "list files only"
            raise RequestError(problem, path=path, hint=hint)
        if paths.count(path) > 1:
            raise SourceError("the same shard is listed twice", path=path)
    matches = [SHARD_NAME.match(path.name) for path in paths]
    prefixes = {match["prefix"] for match in matches if match}
    if len(prefixes) > 1:
        names = ", ".join(sorted(prefixes))
        raise SourceError("shards of different models", path=paths[0], found=names)


def _check_single(header: GgufHeader) -> None:
    count = _split_value(header, "split.count", "u16")
    if count is not None and count > 1:
        problem = "one shard of several, under a name that does not say which"
        expected = f"a name like MODEL-00001-of-{count:05d}.gguf"
        name, hint = os.path.basename(header.path), "restore the name, or list all shards"
        _fail(header, "split.count", problem, expected, name, hint)


def _in_order(headers: list[GgufHeader]) -> list[GgufHeader]:
    """Sort headers by the numbers that they state."""
    numbers = [_split_value(header, "split.no", "u16") or 0 for header in headers]
    by_number = dict(zip(numbers, headers, strict=True))
    for header, number in zip(headers, numbers, strict=True):
        if by_number[number] is not header:
            actual = f"{number}, as {by_number[number].path}"
            _fail(header, "split.no", "two files are the same shard", None, actual)
    return [by_number[number] for number in sorted(by_number)]


def _check(headers: list[GgufHeader]) -> Source:
    first = headers[0]
    kind = first.value("general.type")
    if kind in NOT_MODELS:
        problem, hint = NOT_MODELS[kind]
        _fail(first, "general.type", problem, hint=hint.format(shell_word(first.path)))
    count = _split_value(first, "split.count", "u16") or 0
    if count > 1 or len(headers) > 1:
        _check_shards(headers, count)
    _check_tensors(headers)
    return Source(tuple(headers))


def _check_shards(headers: list[GgufHeader], count: int) -> None:
    if count != len(headers):
        problem = "shards are missing, or of another model"
        _fail(headers[0], "split.count", problem, f"{count} shards", len(headers))
    for number, header in enumerate(headers):
        _expect(header, "split.no", "u16", number)
        _expect(header, "split.count", "u16", count)
        match = SHARD_NAME.match(os.path.basename(header.path))
        if match and (int(match["number"]), int(match["count"])) != (number + 1, count):
            problem = "the name and the header name different shards"
            expected = f"{number + 1:05d}-of-{count:05d} in the name"
            actual = f"{match['number']}-of-{match['count']}"
            hint = "it was renamed: restore the name, or download it again"
            _fail(header, "split.no", problem, expected, actual, hint)
    total = sum(len(header.tensors) for header in headers)
    for header in headers:
        _expect(header, "split.tensors.count", "i32", total)


def _expect(header: GgufHeader, key: str, type_name: str, expected: int) -> None:
    value = _split_value(header, key, type_name)
    if value != expected:
        actual = "no such key" if value is None else value
        _fail(header, key, "the shards do not fit together", expected, actual)


def _split_value(header: GgufHeader, key: str, type_name: str) -> int | None:
    value = header.metadata.get(key)
    if value is None:
        return None
    if value.type_name != type_name or not isinstance(value.data, int):
        _fail(header, key, "wrong type", type_name, value.type_name)
    return value.data


def _fail(
    header: GgufHeader,
    key: str,
    problem: str,
    expected: object = None,
    actual: object = None,
    hint: str | None = None,
) -> NoReturn:
    path, place = header.path, f"key {key!r}"
    raise SourceError(problem, path=path, place=place, expected=expected, found=actual, hint=hint)


def _check_tensors(headers: list[GgufHeader]) -> None:
    paths: dict[str, str] = {}
    for header in headers:
        for tensor in header.tensors:
            other = paths.setdefault(tensor.name, header.path)
            if other is not header.path:
                place, also = f"tensor {tensor.name!r}", f"also in {other}"
                raise SourceError("stands in two shards", path=header.path, place=place, found=also)
