"""Verify an export: compare its files with those that exporting the model anew would write.

The plan of an export says where each byte of it comes from. Parts are compared by the digests of
the pack's index; headers, manifests and parts without digests byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moepack.common.errors import PackError, RequestError, SourceError
from moepack.common.paths import PathOrPaths
from moepack.common.phases import Phases, Progress, advancing
from moepack.pack.engines.contract import Engine, LastFile, Settings
from moepack.pack.engines.exporting import find_engine, require
from moepack.pack.opening.open_model import open_shards
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.checked_pack import CheckedRange, Segment, Where
from moepack.pack.verifying.report import Finding, Findings, Report
from moepack.pack.verifying.scan import scan
from moepack.storage.extents import Extent, NewFile, runs
from moepack.storage.regular_file import read_back

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
    chosen = find_engine(engine)
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
        return _verify(chosen, Path(path), opened, reference, threads, progress)


def _verify(
    engine: Engine,
    path: Path,
    pack: Pack,
    reference: str,
    threads: int,
    progress: Progress | None,
) -> Report:
    """Compare all files of an export; `reference` names the pack in messages."""
    findings = Findings()
    settings = _settings_of(engine, pack, path)
    require(engine, pack, settings)
    plan = engine.plan(pack, path, settings)
    phases = Phases(progress)
    heads = plan.heads(threads, phases.begin(later=sum(file.length for file in plan.files)))
    files = [file for file in plan.files if _is_there(plan.folder, file, findings)]
    paths = [plan.folder / file.name for file in files]
    segments = _segments(pack, files)
    length = sum(file.length for file in files)
    advanced = advancing(phases.begin(), length)
    findings.all += _compare(pack, paths, segments, heads, reference, threads, advanced)
    if plan.last is not None:
        length += _check_last(plan.folder, plan.last, phases.begin(), findings)
    if engine.owns_folder:
        expected = {file.name for file in plan.files} | {plan.last.name if plan.last else ""}
        for name in sorted(set(os.listdir(path)) - expected):
            findings.add("surplus", "no file of this export", file=name)
    return _report(path, findings.in_order(), segments, length, reference)


def _settings_of(engine: Engine, pack: Pack, path: Path) -> Settings:
    """Return the options of the export as it states them; the defaults if it is damaged."""
    defaults = {option.name: option.default for option in engine.options}
    try:
        return defaults | dict(engine.settings_of(pack, path))
    except Exception:  # a damaged one may raise anything; its bytes are compared all the same
        return defaults


def _is_there(folder: Path, file: NewFile, findings: Findings) -> bool:
    path = folder / file.name
    if not path.is_file():
        findings.add("missing", "no such file", file=file.name)
        return False
    length = path.stat().st_size
    if length != file.length:
        message = f"{length:,} bytes, expected {file.length:,}"
        findings.add("file", message, file=file.name)
    return length == file.length


def _segments(pack: Pack, files: Sequence[NewFile]) -> list[Segment]:
    """Return all of the files, whose ranges came from the pack's files and heads."""
    owners = _owners(pack)

    def checked(number: int, extent: Extent) -> CheckedRange:
        place = (extent.input, extent.input_offset)
        return CheckedRange(
            file=number,
            offset=extent.offset,
            length=extent.length,
            noun="part",
            where=owners.get(place, {}),
            digest=extent.digest,
            strong=None,
            shard=extent.input,
            shard_offset=extent.input_offset,
            source=place if extent.digest is None else None,
        )

    return [
        Segment(number, run.start, run.end, tuple(checked(number, one) for one in run.extents))
        for number, file in enumerate(files)
        for run in runs(file)
    ]


def _owners(pack: Pack) -> dict[tuple[int, int], Where]:
    """Return what lies in the pack's files, by the number of the file and the offset in it."""
    owners: dict[tuple[int, int], Where] = {}
    for family in pack.index.families:
        for expert in range(family.expert_count):
            first = family.first_part + expert * len(family.part_kinds)
            parts = pack.index.parts(first, family.part_kinds)
            for kind, (offset, _, _, file, _) in zip(family.part_kinds, parts, strict=True):
                where = {"layer": family.layer, "expert": expert, "part": kind.name}
                owners[file, offset] = where
    for tensor in pack.index.tensors():
        if tensor.length:
            owners[tensor.file, tensor.offset] = {"tensor": tensor.name}
    return owners


def _compare(
    pack: Pack,
    paths: Sequence[Path],
    segments: Sequence[Segment],
    heads: Sequence[bytes],
    reference: str,
    threads: int,
    advanced: Callable[[int], None],
) -> Iterator[Finding]:
    """Yield the differences of an export; what lacks its digest is compared with the pack."""
    fault = PackError if reference == "the pack" else SourceError
    inputs = list(map(str, pack.file_paths))
    ranges = [one for segment in segments for one in segment.ranges]
    used = inputs if any(one.source is not None for one in ranges) else []
    findings = scan(paths, used, segments, threads, advanced, fault=fault).findings
    wrong = {(one.file, one.offset) for one in findings if one.kind == "digest"}
    again = []
    for one in (one for one in ranges if (paths[one.file].name, one.offset) in wrong):
        assert one.shard is not None
        if one.where:
            alone = one._replace(digest=None, source=(one.shard, one.shard_offset))
            again.append(Segment(one.file, one.offset, one.end, (alone,)))
            continue
        actual = read_back(paths[one.file], one.end)[one.offset :]
        offset = one.offset + _common_length(actual, heads[one.shard - len(inputs)])
        message = f"the header differs from that of an export of {reference}"
        yield Finding("record", message, file=paths[one.file].name, offset=offset)
    if again:
        findings += scan(paths, inputs, again, threads, lambda _length: None, fault=fault).findings
    located = {finding[2:7] for finding in findings if finding.kind == "bytes"}
    for finding in findings:
        if finding.kind == "bytes":
            yield finding._replace(message=f"not the bytes of {reference}")
        elif finding.kind != "digest":
            yield finding
        elif finding[2:6] != (None, None, None, None) and finding[2:7] not in located:
            message = "they do not have their digest, neither here nor in the pack"
            yield finding._replace(message=message)


def _check_last(folder: Path, last: LastFile, progress: Progress, findings: Findings) -> int:
    """Compare the last file, if the files that it describes are there; return its length."""
    path = folder / last.name
    if not path.is_file():
        findings.add("missing", "no such file", file=last.name)
    if any(finding.kind == "missing" for finding in findings.all):
        return 0
    expected = last.content(progress)
    actual = read_back(path, len(expected))
    if actual != expected:
        offset = _common_length(actual, expected)
        line = expected.count(b"\n", 0, offset)
        message = f"line {line + 1:,}: expected {_line(expected, line)}"
        message += f", found {_line(actual, line)}"
        findings.add("manifest", message, file=last.name, offset=offset)
    return len(expected)


def _common_length(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _line(text: bytes, number: int) -> str:
    line = text.split(b"\n")[number].strip().decode("utf-8", "replace")
    return line if len(line) <= _SHOWN_LENGTH else f"{line[:_SHOWN_LENGTH]}…"


def _report(
    path: Path,
    findings: tuple[Finding, ...],
    segments: Sequence[Segment],
    length: int,
    reference: str,
) -> Report:
    ranges = [one for segment in segments for one in segment.ranges]
    parts = [one.where for one in ranges if "part" in one.where]
    tensor_count = sum("tensor" in one.where for one in ranges)
    expert_count = len({(part["layer"], part["expert"]) for part in parts})
    layers = tuple(sorted({part["layer"] for part in parts}))
    # A manifest of the pack's own files copies nothing: `verify` is for the pack itself.
    unchecked = () if ranges or findings else ("the experts, which are the pack's own",)
    kinds = {finding.kind for finding in findings}
    problem = "not whole" if kinds & {"missing", "surplus", "file"} else "damaged"
    return Report(
        passed=False if findings else (None if unchecked else True),
        headline=f"the export is {problem}, or not of {reference}" if findings else None,
        path=os.fspath(path),
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
        compared_with=reference,
        not_looked_at=unchecked,
    )
