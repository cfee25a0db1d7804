"""Verify an export: every byte of it against the pack or the source.

The format's own reader finds the slices; this compares them, and looks for what is missing, what is
too much, and what is not zero between them. It shares nothing with what writes exports.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from moepack.common.errors import MoepackError, RequestError, read_failure
from moepack.common.paths import PathOrPaths, path_list
from moepack.common.phases import Progress, advancing
from moepack.pack.engines import registry
from moepack.pack.engines.contract import (
    Engine,
    ExpectedPart,
    ExpectedTensor,
    ExportedFile,
    ExportedMetadata,
    ExportedSlice,
)
from moepack.pack.engines.references import PackReference, Reference, SourceReference
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.report import Finding, Findings, Report
from moepack.pack.verifying.witness import read_shards
from moepack.source import ggml_types
from moepack.source.shards import find_shards
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import run_each

_PIECE_LENGTH = 1 << 20
_SLICES_AT_A_TIME = 64

Advanced = Callable[[int], None]


def verify_export(
    engine: str,
    path: str | os.PathLike[str],
    *,
    pack: str | os.PathLike[str] | None = None,
    source: PathOrPaths | None = None,
    threads: int = 4,
    progress: Progress | None = None,
) -> Report:
    """Verify the export of a pack for `engine` at `path`, a file or folder.

    Every byte is compared with the pack, or with the source that it was made from; bytes between
    the experts must be zeros, digests and records that the format has must be right. `progress` is
    called from one thread at a time.

    Raises RequestError for an unknown format or without anything to compare with, the errors of
    opening the pack or the source, and MachineError if the machine cannot; every other fault is a
    finding.
    """
    chosen = registry.find(engine)
    if (pack is None) == (source is None):
        raise RequestError("one thing to compare with is needed: a `pack`, or a `source`")
    require_export(path)
    if source is not None:
        return _Check(chosen, Path(path), _source_reference(source)).run(threads, progress)
    with Pack(pack or "") as opened:
        opened.require_complete()
        return _Check(chosen, Path(path), PackReference(opened)).run(threads, progress)


def is_of_model(engine: str, path: str | os.PathLike[str], source: PathOrPaths) -> bool:
    """Return whether an export has anything of a source, by types, shapes and lengths alone.

    Raises as `verify_export`; no byte of an expert is read.
    """
    chosen = registry.find(engine)
    require_export(path)
    check = _Check(chosen, Path(path), _source_reference(source))
    return any(map(check.is_expected, check.slices))


def require_export(path: str | os.PathLike[str]) -> None:
    """Raise RequestError if there is nothing at `path`."""
    if not os.path.exists(path):
        raise RequestError("no such file or folder", path=path)


def _source_reference(source: PathOrPaths) -> SourceReference:
    shards = [str(shard) for shard in find_shards(source)]
    return SourceReference(read_shards(shards, sort=len(path_list(source)) > 1))


class _Zeros(NamedTuple):
    """Bytes of a file that must be zeros."""

    path: Path
    start: int
    end: int


class _Check:
    """The verification of one export."""

    def __init__(self, engine: Engine, path: Path, reference: Reference) -> None:
        self.path = path
        self.reference = reference
        self.findings = Findings()
        self.is_whole = engine.is_whole
        self.parts = reference.parts()
        self.dense = {tensor.name: tensor for tensor in reference.dense()}
        self._by_name = {(part.layer, part.name): part for part in self.parts}
        self.files: dict[Path, int] = {}
        self.slices: list[ExportedSlice] = []
        self._collect(engine)

    def run(self, threads: int, progress: Progress | None) -> Report:
        """Compare all bytes; return the report."""
        self._check_counts()
        zeros = list(self._all_zeros())
        comparable = list(filter(self.is_expected, self.slices))
        work: list[Callable[[Advanced], list[Finding]]] = [
            partial(self._compare, comparable[first : first + _SLICES_AT_A_TIME])
            for first in range(0, len(comparable), _SLICES_AT_A_TIME)
        ]
        work += [partial(self._check_zeros, one) for one in zeros]
        compared = sum(one.length for one in comparable)
        read = compared + sum(one.end - one.start for one in zeros)
        advanced = advancing(progress, read)
        for findings in run_each(lambda one, advance: one(advance), work, threads, advanced):
            self.findings.all += findings
        findings_in_order = self.findings.in_order()
        experts = {(one.layer, one.expert) for one in comparable if one.layer is not None}
        layers = tuple(sorted({part.layer for part in self.parts}))
        return Report(
            passed=not findings_in_order,
            headline=_headline(findings_in_order, self.reference.name),
            path=os.fspath(self.path),
            findings=findings_in_order,
            layers=layers,
            checked_layers=layers,
            blob_count=len(experts),
            checked_blob_count=len(experts),
            part_count=sum(one.layer is not None for one in comparable),
            tensor_count=sum(one.layer is None for one in comparable),
            checked_tensor_count=sum(one.layer is None for one in comparable),
            read_length=read,
            data_length=read,
            compared_length=compared,
            compared_with=self.reference.name,
        )

    def _collect(self, engine: Engine) -> None:
        """Collect what the format's reader finds in the export."""
        try:
            for item in engine.slices(self.path, self.parts):
                if isinstance(item, Finding):
                    self.findings.all.append(item)
                elif isinstance(item, ExportedFile):
                    self.files[item.path] = item.head_length
                elif isinstance(item, ExportedMetadata):
                    self._check_metadata(item.pairs)
                else:
                    self.slices.append(item)
        except OSError as error:
            raise read_failure(error, error.filename or self.path, RequestError) from error
        except MoepackError as error:
            self.findings.add_error("file", error, file=error.path)

    def _check_metadata(self, pairs: Mapping[str, bytes]) -> None:
        """Compare metadata with the source's, but for the split and the alignment."""
        expected = self.reference.metadata()
        for key in sorted(expected.keys() | pairs.keys()):
            is_own = key.startswith("split.") or key == "general.alignment"
            if not is_own and pairs.get(key) != expected.get(key):
                message = f"the metadata {key} is not that of {self.reference.name}"
                self.findings.add("bytes", message, file=self.path.name)

    def _check_counts(self) -> None:
        """Find slices that are missing, twice, too many, or of another length."""
        left = {
            (part.layer, part.name): set(range(part.expert_count))
            for part in self.parts
            if self.is_whole or _is_routed_weight(part.name)
        }
        dense = set(self.dense) if self.is_whole else set()
        for one in self.slices:
            if one.layer is None or one.expert is None:
                is_known = one.part in dense
                dense.discard(one.part)
            else:
                experts = left.get((one.layer, one.part), set())
                is_known = one.expert in experts
                experts.discard(one.expert)
            if not is_known:
                message = f"twice, or not in {self.reference.name}"
                self.findings.add("surplus", message, **_where(one))
        for (layer, name), experts in left.items():
            for expert in sorted(experts):
                self.findings.add(
                    "missing", "no slice of it", layer=layer, expert=expert, part=name
                )
        for name in sorted(dense):
            self.findings.add("missing", "no such tensor", tensor=name)

    def is_expected(self, one: ExportedSlice) -> bool:
        """Return whether a slice has bytes to compare with; find those of another length."""
        model = self._expected(one)
        if model is None:
            return False
        type_name = ggml_types.type_name(model.type_id)
        if one.type_name is not None and one.type_name.lower() != type_name.lower():
            message = f"type {one.type_name}, expected {type_name}"
            self.findings.add("shape", message, **_where(one))
        if one.shape is not None and one.shape != model.shape:
            self.findings.add("shape", f"{one.shape}, expected {model.shape}", **_where(one))
        if model.length != one.length:
            message = f"{one.length:,} bytes, expected {model.length:,}"
            self.findings.add("shape", message, **_where(one))
        elif one.offset + one.length > one.path.stat().st_size:
            self.findings.add("file", "it ends past the end of the file", **_where(one))
        else:
            return True
        return False

    def _expected(self, one: ExportedSlice) -> ExpectedPart | ExpectedTensor | None:
        """Return what a slice has to be; None if there is no such thing."""
        if one.layer is None or one.expert is None:
            return self.dense.get(one.part)
        part = self._by_name.get((one.layer, one.part))
        return part if part is not None and 0 <= one.expert < part.expert_count else None

    def _all_zeros(self) -> Iterator[_Zeros]:
        """Yield the bytes of all files that nothing takes; find slices that overlap."""
        by_file: dict[Path, list[ExportedSlice]] = defaultdict(list)
        for one in self.slices:
            by_file[one.path].append(one)
        for path, head_length in self.files.items():
            yield from self._zeros(path, head_length, by_file[path])

    def _zeros(
        self, path: Path, position: int, slices: Iterable[ExportedSlice]
    ) -> Iterator[_Zeros]:
        end = path.stat().st_size
        for one in sorted(slices, key=attrgetter("offset")):
            if one.offset < position:
                self.findings.add("record", "overlaps what lies before it", **_where(one))
            elif one.offset > position:
                yield _Zeros(path, position, min(one.offset, end))
            position = max(position, one.offset + one.length)
        if position < end:
            yield _Zeros(path, position, end)

    def _compare(self, slices: Sequence[ExportedSlice], advanced: Advanced) -> list[Finding]:
        findings: list[Finding] = []
        with self.reference.open() as read, ExitStack() as stack:
            files = {
                path: stack.enter_context(open(path, "rb", buffering=0, opener=open_regular))
                for path in {one.path for one in slices}
            }
            for one in slices:
                data = _read(files[one.path].fileno(), one.offset, one.length)
                findings += self._differences(one, data, read(one))
                advanced(one.length)
        return findings

    def _differences(
        self, one: ExportedSlice, data: bytes, expected: bytes | memoryview
    ) -> Iterator[Finding]:
        if data != expected:
            where = _where(one) | {"offset": one.offset + _first_difference(data, expected)}
            yield Finding("bytes", f"not the bytes of {self.reference.name}", **where)
        elif one.sha256 not in (None, hashlib.sha256(data).hexdigest()):
            yield Finding("digest", "its SHA-256 is not the one stated for it", **_where(one))

    def _check_zeros(self, zeros: _Zeros, advanced: Advanced) -> list[Finding]:
        with open(zeros.path, "rb", buffering=0, opener=open_regular) as file:
            position = zeros.start
            while position < zeros.end:
                length = min(_PIECE_LENGTH, zeros.end - position)
                data = os.pread(file.fileno(), length, position)
                rest = data.lstrip(b"\0")
                if rest or not data:
                    offset = position + len(data) - len(rest)
                    message = "a byte between the experts is not zero"
                    return [Finding("padding", message, file=zeros.path.name, offset=offset)]
                position += len(data)
                advanced(len(data))
        return []


def _read(descriptor: int, offset: int, length: int) -> bytes:
    """Read bytes of a file; a read of more than 2 GiB comes in pieces."""
    data = os.pread(descriptor, length, offset)
    while 0 < len(data) < length:
        piece = os.pread(descriptor, length - len(data), offset + len(data))
        if not piece:
            break
        data += piece
    return data


def _first_difference(data: bytes, expected: bytes | memoryview) -> int:
    """Return where two texts of bytes first differ."""
    for start in range(0, len(expected), _PIECE_LENGTH):
        pieces = data[start : start + _PIECE_LENGTH], expected[start : start + _PIECE_LENGTH]
        if pieces[0] != pieces[1]:
            pairs = enumerate(zip(*pieces, strict=False))
            return start + next((n for n, (a, b) in pairs if a != b), len(pieces[0]))
    return len(data)


def _is_routed_weight(part: str) -> bool:
    return part.startswith("ffn_") and part.endswith("_exps.weight")


def _where(one: ExportedSlice) -> dict[str, Any]:
    if one.layer is None:
        return {"tensor": one.part, "file": one.path.name}
    return {"layer": one.layer, "expert": one.expert, "part": one.part, "file": one.path.name}


def _headline(findings: Sequence[Finding], reference: str) -> str | None:
    """Return what the findings have in common; None without any."""
    kinds = {finding.kind for finding in findings}
    if not kinds:
        return None
    if kinds <= {"bytes", "digest", "padding"}:
        return f"the export is damaged: it has other bytes than {reference}"
    if "shape" in kinds:
        return f"the export is of another model than {reference}"
    return f"the export is not whole, or not of {reference}"
