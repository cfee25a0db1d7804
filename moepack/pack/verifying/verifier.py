"""Verify a pack: its structure, its padding, every digest, and every byte against the source.

Verification shares the index decoder with the reader, and with the packer only how the files of a
model are named: it learns from `witness` where everything lies in them. It returns all findings and
stops at none, as long as the manifest and the tables of the index can be read at all.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import PathOrPaths, path_list
from moepack.common.phases import Phases, Progress
from moepack.common.tasks import Share
from moepack.pack.format.index import Index
from moepack.pack.format.manifest import Manifest
from moepack.pack.reading.copies import Mirror, Partial, find_mirror
from moepack.pack.reading.directory import pack_folder
from moepack.pack.verifying import agreement, headline, inventory, origins, scope, shard_sha256
from moepack.pack.verifying.comparison import SourceComparison
from moepack.pack.verifying.extents import Item, Segment
from moepack.pack.verifying.report import Findings, Report
from moepack.pack.verifying.scan import Gap, Lengths, SecondOpinion, scan, scan_apart
from moepack.pack.verifying.witness import Witness, read_shards
from moepack.pack.verifying.work_list import WorkList
from moepack.source.shards import find_shards
from moepack.storage.ranges import RangeSet

DEFAULT_THREADS = 4


def verify(
    path: str | os.PathLike[str],
    source: PathOrPaths | None = None,
    *,
    layers: str | Iterable[int] | None = None,
    sample: str | float | None = None,
    seed: int = 0,
    sha256: bool = False,
    with_gguf_py: bool = False,
    part: str | tuple[int, int] | None = None,
    executor: Executor | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Report:
    """Verify the pack at `path`, and compare it with the source that it was made from, if given.

    `source` is any one shard, a folder, or all shards. Index, manifest and the shards' headers are
    always checked; of the bytes, those of `layers` (`0-3,7`, or numbers) if given, and of blobs and
    tensors a `sample` (a share: 0.1 or `10%`), drawn by `seed`. With `sha256` the shards are read
    once more to compare their SHA-256 with the manifest; `with_gguf_py` compares the same blobs and
    tensors with the gguf package's reading of the source. Of a partial pack (see `moepack pull`)
    the bytes that are here are checked. `progress` is called from one thread at a time.

    With `part`, such as `3/16` or (3, 16), only that share of the data files is read, so that a job
    on each of many machines verifies its own; with an `executor` its workers read the files. Both
    must reach pack and source by the same paths.

    Raises PackError if there is no pack or one of an unknown version, SourceError for a shard that
    cannot be read, RequestError for options that make no sense, MachineError if the machine lacks
    memory, threads or open files; every other fault is a finding.
    """
    _check_request(source, sha256, with_gguf_py, executor)
    share = None if part is None else Share(part)
    findings = Findings()
    try:
        folder = pack_folder(path)
        described, partial, index = agreement.open_pack(folder, findings)
        if described is None:
            problem = "manifest.json cannot be read"
            return _unreadable(folder, findings, problem, "all that manifest and index would list")
        witness = None
        if source is not None:
            paths = [str(shard) for shard in find_shards(source)]
            witness = read_shards(paths, sort=len(path_list(source)) > 1)
        if index is None:
            common = headline.write(findings.all, described, None, is_all=False)
            return _unreadable(folder, findings, common, "all that the index would list")
        agreement.check(index, described, findings)
        chosen, left_out = scope.choose(index, layers, sample, seed, partial)
        verification = _Verification(
            folder,
            described,
            index,
            chosen,
            left_out,
            witness,
            findings,
            partial,
            share,
            executor,
        )
        return verification.run(sha256, with_gguf_py, threads, Phases(progress))
    except MemoryError:
        raise MachineError("not enough memory", path=path, hint="use fewer `threads`") from None


def _unreadable(
    folder: Path, findings: Findings, problem: str | None, not_looked_at: str
) -> Report:
    """Return the report on a pack that nothing can be read of but what it begins with."""
    return Report(
        passed=False,
        headline=problem,
        path=str(folder),
        findings=findings.in_order(),
        not_looked_at=(not_looked_at,),
    )


def _check_request(
    source: PathOrPaths | None, sha256: bool, with_gguf_py: bool, executor: Executor | None
) -> None:
    if sha256 and source is None:
        raise RequestError("the SHA-256 of shards needs a source to read", hint="give a `source`")
    if with_gguf_py and source is None:
        raise RequestError("gguf-py needs a source to read", hint="give a `source`")
    if with_gguf_py and executor is not None:
        raise RequestError("gguf-py reads in one process", hint="verify without `executor`")


@dataclass
class _Verification:
    """One verification of a pack, after its index was decoded."""

    path: Path
    manifest: Manifest
    index: Index
    chosen: frozenset[int] | None
    not_looked_at: list[str]
    witness: Witness | None
    findings: Findings
    partial: Partial | None
    share: Share | None
    executor: Executor | None

    def __post_init__(self) -> None:
        self.paths = [self.path / file.name for file in self.index.files]
        self.sha256_count: int | None = None
        self.mirror_length: int | None = None
        origins.check(self.index, self.manifest, self.findings)
        self.comparison: SourceComparison | None = None
        if self.witness is not None:
            self.comparison = SourceComparison(
                self.index, self.manifest, self.witness, self.paths, self.findings
            )
        self.is_same_model = bool(self.comparison and not self.comparison.is_another_model)
        if self.comparison and not self.is_same_model:
            self.not_looked_at.append("the bytes of the source")

    def run(self, sha256: bool, with_gguf_py: bool, threads: int, phases: Phases) -> Report:
        comparison = self.comparison if self.is_same_model else None
        items = inventory.list_items(self.index, self.manifest, comparison, self.findings)
        work_list = WorkList(
            self.path,
            self.manifest,
            self.index,
            self.chosen,
            self.partial,
            self.share,
            comparison,
            self.findings,
            self.not_looked_at,
        )
        work = work_list.segments(items)
        if sha256:
            self.sha256_count = self._check_sha256(threads)
        opinion = self._ask_gguf_py() if with_gguf_py else None
        lengths = self._scan(work, items, opinion, threads, phases.begin())
        self.findings.drop_consequences()
        if self.chosen is None and not (self.witness or self.share or self.findings.all):
            self.sha256_count = shard_sha256.check_restored(
                self, self.paths, threads, phases, self.executor, self.findings
            )
        unchecked = work_list.unread | work_list.unproven | work_list.of_others
        return self._report(lengths, unchecked, with_gguf_py=opinion is not None)

    def _check_sha256(self, threads: int) -> int:
        assert self.witness is not None
        entries = self.manifest.source.shards
        if not all(entry.sha256 for entry in entries):
            self.not_looked_at.append("the SHA-256 of shards for which the manifest states none")
        shards = zip(entries, self.witness.shards, strict=False)
        expected = {shard.path: entry.sha256 for entry, shard in shards if entry.sha256}
        if self.share is not None:
            names = self.share.names(dict.fromkeys(expected, 1))
            expected = {name: expected[name] for name in names}
        return shard_sha256.check_files(expected, threads, self.findings)

    def _ask_gguf_py(self) -> SecondOpinion | None:
        """Check the source with gguf-py too; None if it is another model's."""
        if self.witness is None or not self.is_same_model:
            return None
        from moepack.pack.verifying.gguf_py import Opinion  # here, since it brings numpy and gguf

        opinion = Opinion(self.index, [shard.path for shard in self.witness.shards], self.findings)
        self.not_looked_at += opinion.not_looked_at
        return opinion.piece

    def _scan(
        self,
        work: Sequence[Segment | Gap],
        items: Sequence[list[Item]],
        opinion: SecondOpinion | None,
        threads: int,
        progress: Callable[[int, int], None],
    ) -> Lengths:
        """Read the pack, and its mirror if it has one that can be read."""
        mirror = find_mirror(self.path, self.index)
        mirrored: list[Segment] = []
        if mirror is not None and mirror.problem is not None:
            self.not_looked_at.append(f"its mirror in {mirror.path}: {mirror.problem}")
            mirror = None
        if mirror is not None:
            mirrored = self._mirrored(mirror, items)
        segments = (one for one in (*work, *mirrored) if isinstance(one, Segment))
        total = sum(one.end - one.start for one in segments)

        def advanced(length: int) -> None:
            progress(length, total)

        shard_paths = [] if self.witness is None else [one.path for one in self.witness.shards]
        if self.executor is not None:
            lengths = scan_apart(
                self.executor, self.paths, shard_paths, work, threads, advanced, self.findings
            )
        else:
            lengths = scan(self.paths, shard_paths, work, threads, advanced, self.findings, opinion)
        if mirror is not None:
            findings = Findings()
            copies = [mirror.path / file.name for file in self.index.files]
            self.mirror_length = scan(copies, [], mirrored, threads, advanced, findings).read
            self.findings.all += [
                finding._replace(kind="mirror", message=f"in the mirror {finding.message}")
                for finding in findings.all
            ]
        return lengths

    def _mirrored(self, mirror: Mirror, items: Sequence[list[Item]]) -> list[Segment]:
        """List the chosen items that lie in the mirror."""
        assert mirror.record is not None
        segments: list[Segment] = []
        for file, of_file in enumerate(items):
            name = self.index.files[file].name
            coverage = RangeSet(mirror.record.ranges(name))
            for start, end, number, ranges in of_file:
                is_chosen = number is not None and (self.chosen is None or number in self.chosen)
                if is_chosen and coverage.covers(start, end):
                    plain = tuple(one._replace(source=None) for one in ranges)
                    segments.append(Segment(file, start, end, plain))
        return segments

    def _report(self, lengths: Lengths, unchecked: set[int], *, with_gguf_py: bool) -> Report:
        index = self.index
        checked = self.chosen
        if checked is None:
            checked = frozenset(range(index.blob_count + index.tensor_count))
        checked -= unchecked
        layers = dict.fromkeys(family.layer for family in index.families)
        skipped = {
            family.layer
            for family in index.families
            if not checked.issuperset(
                range(family.first_blob, family.first_blob + family.expert_count)
            )
        }
        checked_blob_count = sum(number < index.blob_count for number in checked)
        findings = self.findings.in_order()
        return Report(
            passed=False if findings else None if self.not_looked_at else True,
            headline=headline.write(
                findings, self.manifest, self.comparison, is_all=not self.not_looked_at
            ),
            path=str(self.path),
            findings=findings,
            layers=tuple(layers),
            checked_layers=tuple(layer for layer in layers if layer not in skipped),
            blob_count=index.blob_count,
            part_count=index.part_count,
            tensor_count=index.tensor_count,
            checked_blob_count=checked_blob_count,
            checked_tensor_count=len(checked) - checked_blob_count,
            read_length=lengths.read,
            data_length=sum(file.length for file in index.files),
            compared_length=lengths.compared if self.comparison else None,
            sha256_count=self.sha256_count,
            gguf_py_length=lengths.second if with_gguf_py else None,
            not_looked_at=tuple(self.not_looked_at),
            mirror_length=self.mirror_length,
        )
