"""Verify an export: compare its files with those that exporting the model anew would write.

The plan of an export says where each byte of it comes from. Parts are compared by the digests of
the pack's index; headers, manifests and parts without digests byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.common.errors import PackError, RequestError, SourceError, read_failure
from moepack.common.paths import PathOrPaths
from moepack.common.phases import Phases, Progress, advancing
from moepack.pack.engines import registry
from moepack.pack.engines.contract import Engine, LastFile, Settings
from moepack.pack.engines.exporting import require
from moepack.pack.opening.shards import open_shards
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import part_extent
from moepack.pack.verifying.report import Finding, Findings, Report
from moepack.storage.copying import read_extent
from moepack.storage.extents import Extent, NewFile, Run, digests_of, runs
from moepack.storage.inputs import Inputs
from moepack.storage.regular_file import open_regular, read_back
from moepack.storage.thread_pool import run_each

_PIECE_LENGTH = 512 << 10
_SHOWN_LENGTH = 256


def verify_export(
    engine: str,
    path: str | os.PathLike[str],
    *,
    pack: str | os.PathLike[str] | None = None,
    source: PathOrPaths | None = None,
    threads: int = 4,
    progress: Progress | None = None,
) -> Report:
    """Verify the export of a model for `engine` at `path`, a file or folder.

    Each file is compared, to the byte, with the one that `export` would write of the `pack`, or of
    the `source` that it was made from, with the options by which the export was written. `progress`
    is called from one thread at a time.

    Raises RequestError for an unknown format, for needs of the engine that the model does not meet,
    and without anything to compare with; the errors of opening the pack, the source, or a GGUF that
    the export names; and MachineError if the machine cannot. Every other fault is a finding.
    """
    chosen = registry.find(engine)
    if (pack is None) == (source is None):
        raise RequestError("one thing to compare with is needed: a `pack`, or a `source`")
    if not os.path.exists(path):
        raise RequestError("no such file or folder", path=path)
    if os.path.isdir(path) != chosen.is_folder:
        expected = "a folder" if chosen.is_folder else "a file"
        raise RequestError("no export of this format", path=path, expected=expected)
    if source is not None and chosen.default_name is not None:
        problem = f"{chosen.title} reads experts in the pack: name that with `pack`"
        hint = "`moepack verify PACK --source SOURCE` compares the experts with the source"
        raise RequestError(problem, hint=hint)
    with open_shards(source) if source is not None else Pack(pack or "") as opened:
        opened.require_complete()
        reference = "the pack" if source is None else "the source"
        return _Check(opened, Path(path), reference).run(chosen, threads, progress)


class _Name(NamedTuple):
    """A part of an expert, or a dense tensor."""

    layer: int | None = None
    expert: int | None = None
    part: str | None = None
    tensor: str | None = None


class _Check:
    """The verification of the export at `path`; `reference` names the pack in messages."""

    def __init__(self, pack: Pack, path: Path, reference: str) -> None:
        self.pack = pack
        self.path = path
        self.reference = reference
        self.findings = Findings()
        self.names = _names(pack)

    def run(self, engine: Engine, threads: int, progress: Progress | None) -> Report:
        """Compare all files; return the report."""
        settings = self._settings_of(engine)
        require(engine, self.pack, settings)
        plan = engine.plan(self.pack, self.path, settings)
        phases = Phases(progress)
        heads = plan.heads(threads, phases.begin(later=sum(file.length for file in plan.files)))
        files = [file for file in plan.files if self._is_there(plan.folder, file)]
        work = [(plan.folder / file.name, run) for file in files for run in runs(file)]
        length = sum(file.length for file in files)
        fault = PackError if self.reference == "the pack" else SourceError
        with Inputs(self.pack.file_paths, fault, heads) as inputs:

            def compare(item: tuple[Path, Run], advanced: Callable[[int], None]) -> None:
                self._compare(*item, inputs)
                advanced(item[1].end - item[1].start)

            run_each(compare, work, threads, advancing(phases.begin(), length))
        if plan.last is not None:
            length += self._check_last(plan.folder, plan.last, phases.begin())
        if engine.owns_folder:
            expected = {file.name for file in plan.files} | {plan.last.name if plan.last else ""}
            for name in sorted(set(os.listdir(self.path)) - expected):
                self.findings.add("surplus", "no file of this export", file=name)
        return self._report(length, [extent for _, run in work for extent in run.extents])

    def _settings_of(self, engine: Engine) -> Settings:
        """Return the options of the export as it states them; the defaults if it is damaged."""
        defaults = {option.name: option.default for option in engine.options}
        try:
            return defaults | dict(engine.settings_of(self.pack, self.path))
        except Exception:  # a damaged one may raise anything; its bytes are compared all the same
            return defaults

    def _is_there(self, folder: Path, file: NewFile) -> bool:
        """Return whether a file is there in its length; add a finding if not."""
        path = folder / file.name
        if not path.is_file():
            self.findings.add("missing", "no such file", file=file.name)
            return False
        length = path.stat().st_size
        if length != file.length:
            message = f"{length:,} bytes, expected {file.length:,}"
            self.findings.add("file", message, file=file.name)
        return length == file.length

    def _compare(self, path: Path, run: Run, inputs: Inputs) -> None:
        """Compare a run of a file with the inputs of its extents, and with zeros between them."""
        with_digests = [extent for extent in run.extents if extent.digest is not None]
        buffer = memoryview(bytearray(_PIECE_LENGTH))
        position = run.start
        try:
            digests = digests_of(path, with_digests, follows_link=True)
            pairs = zip(with_digests, digests, strict=True)
            right = {extent for extent, actual in pairs if actual == extent.digest}
            with open(path, "rb", buffering=0, opener=open_regular) as file:
                for extent in (*run.extents, Extent(run.end, 0, 0, 0)):
                    zeros = _zeros(extent.offset - position)
                    offset = _first_difference(file.fileno(), position, zeros)
                    if offset is not None:
                        message = "a byte of the padding is not zero"
                        self.findings.add("padding", message, file=path.name, offset=offset)
                    if extent.length and extent not in right:
                        pieces = read_extent(inputs, extent, lambda left: buffer[:left])
                        offset = _first_difference(file.fileno(), extent.offset, pieces)
                        self._add_difference(path.name, extent, offset)
                    position = extent.end
        except OSError as error:
            raise read_failure(error, path, RequestError) from error

    def _add_difference(self, file: str, extent: Extent, offset: int | None) -> None:
        """Add a finding for other bytes from `offset` on, or for a wrong digest alone."""
        name = self.names.get((extent.input, extent.input_offset))
        if name is None and offset is not None:
            message = f"the header differs from that of an export of {self.reference}"
            self.findings.add("record", message, file=file, offset=offset)
        elif name is not None and offset is not None:
            message = f"not the bytes of {self.reference}"
            self.findings.add("bytes", message, file=file, offset=offset, **name._asdict())
        elif name is not None and extent.digest is not None:
            message = "they do not have their digest, neither here nor in the pack"
            where = name._asdict() | {"file": file, "offset": extent.offset}
            self.findings.add("digest", message, **where)

    def _check_last(self, folder: Path, last: LastFile, progress: Progress) -> int:
        """Compare the last file, if the files that it describes are there; return its length."""
        path = folder / last.name
        if not path.is_file():
            self.findings.add("missing", "no such file", file=last.name)
        if any(finding.kind == "missing" for finding in self.findings.all):
            return 0
        expected = last.content(progress)
        actual = read_back(path, len(expected))
        if actual != expected:
            offset = _common_length(actual, expected)
            line = expected.count(b"\n", 0, offset)
            message = f"line {line + 1:,}: expected {_line(expected, line)}"
            message += f", found {_line(actual, line)}"
            self.findings.add("manifest", message, file=last.name, offset=offset)
        return len(expected)

    def _report(self, length: int, extents: Sequence[Extent]) -> Report:
        names = [self.names.get((one.input, one.input_offset)) for one in extents]
        parts = [name for name in names if name is not None and name.layer is not None]
        tensor_count = sum(name is not None and name.tensor is not None for name in names)
        expert_count = len({(part.layer, part.expert) for part in parts})
        layers = tuple(sorted({part.layer for part in parts if part.layer is not None}))
        findings = self.findings.in_order()
        # A manifest of the pack's own files copies nothing: `verify` is for the pack itself.
        unchecked = () if extents or findings else ("the experts, which are the pack's own",)
        return Report(
            passed=False if findings else (None if unchecked else True),
            headline=_headline(findings, self.reference),
            path=os.fspath(self.path),
            findings=findings,
            layers=layers,
            checked_layers=layers,
            blob_count=expert_count,
            checked_blob_count=expert_count,
            part_count=len(parts),
            tensor_count=tensor_count,
            checked_tensor_count=tensor_count,
            read_length=length,
            data_length=length,
            compared_length=length,
            compared_with=self.reference,
            not_looked_at=unchecked,
        )


def _names(pack: Pack) -> dict[tuple[int, int], _Name]:
    """Return what lies in the pack's files, by the number of the file and the offset in it."""
    names = {}
    for family in pack.index.families:
        for expert in range(family.expert_count):
            for number, kind in enumerate(family.part_kinds):
                extent = part_extent(pack.index, family, expert, number, 0)
                name = _Name(family.layer, expert, kind.name)
                names[extent.input, extent.input_offset] = name
    for tensor in pack.index.tensors():
        if tensor.length:
            names[tensor.file, tensor.offset] = _Name(tensor=tensor.name)
    return names


def _first_difference(
    descriptor: int, position: int, pieces: Iterable[bytes | memoryview]
) -> int | None:
    """Return the first offset, from `position` on, at which a file has other bytes."""
    for expected in pieces:
        actual = os.pread(descriptor, len(expected), position)
        if actual != expected:
            return position + _common_length(actual, expected)
        position += len(expected)
    return None


def _common_length(one: bytes, other: bytes | memoryview) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _line(text: bytes, number: int) -> str:
    line = text.split(b"\n")[number].strip().decode("utf-8", "replace")
    return line if len(line) <= _SHOWN_LENGTH else f"{line[:_SHOWN_LENGTH]}…"


def _zeros(length: int) -> Iterator[bytes]:
    zeros = bytes(min(length, _PIECE_LENGTH))
    for start in range(0, length, _PIECE_LENGTH):
        yield zeros[: length - start]


def _headline(findings: Sequence[Finding], reference: str) -> str | None:
    """Return what the findings have in common; None without any."""
    kinds = {finding.kind for finding in findings}
    if not kinds:
        return None
    problem = "not whole" if kinds & {"missing", "surplus", "file"} else "damaged"
    return f"the export is {problem}, or not of {reference}"
