"""Verify a pack: its structure, its padding, every digest, and every byte against the source.

Verification shares the index decoder with the reader, and with the packer only how the files of a
model are named: where everything lies in them it learns from `witness`. It gives back all findings
and stops at none, as long as the manifest and the tables of the index can be read at all.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MachineError, PackError, RequestError, is_shortage
from moepack.format import manifest
from moepack.format.index import Index
from moepack.format.manifest import Manifest
from moepack.format.source_entry import ShardEntry
from moepack.paths import PathOrPaths, listed
from moepack.phases import Phases, Progress
from moepack.reading.directory import read_manifest
from moepack.reading.mirror import Mirror, find_mirror
from moepack.reading.shard_map import Description, map_shards
from moepack.sizes import gaps
from moepack.source.shards import find_shards
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import ThreadPool
from moepack.verifying import agreement, headline, inventory, origins, scope
from moepack.verifying.comparison import Comparison, sha256_of
from moepack.verifying.extents import Item, Run, cut, item_runs, whole_runs
from moepack.verifying.mirrored import mirrored_runs, scan_mirror
from moepack.verifying.report import Findings, Report
from moepack.verifying.scan import Gap, Scan, SecondOpinion
from moepack.verifying.scope import Scope
from moepack.verifying.shard_sha256 import sha256_of_shards
from moepack.verifying.witness import Witness, hear

DEFAULT_THREADS = 4


class _Options(NamedTuple):
    """What was asked for, as `verify` takes it."""

    layers: str | Iterable[int] | None
    sample: str | float | None
    seed: int
    sha256: bool
    with_gguf_py: bool
    threads: int
    phases: Phases


def verify(
    path: str | os.PathLike[str],
    source: PathOrPaths | None = None,
    *,
    layers: str | Iterable[int] | None = None,
    sample: str | float | None = None,
    seed: int = 0,
    sha256: bool = False,
    with_gguf_py: bool = False,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Report:
    """Verify the pack at `path`, against the source that it was made from where one is given.

    `source` is any one shard, a folder, or all shards. Index, manifest and the shards' headers are
    always checked; of the bytes, those of `layers` (`0-3,7`, or numbers) where these are named, and
    of blobs and tensors a `sample` (a share: 0.1 or `10%`), which another `seed` draws anew. With
    `sha256` the shards are read once more to compare their SHA-256 with what the manifest states;
    `with_gguf_py` compares the same blobs and tensors with what the gguf package reads in them.
    `progress` is called from one thread at a time.

    Raises PackError where there is no pack or one of an unknown version, SourceError where a shard
    cannot be read, RequestError for options that make no sense, MachineError where the machine has
    not enough memory, threads or open files; everything else that is wrong is a finding.
    """
    options = _Options(layers, sample, seed, sha256, with_gguf_py, threads, Phases(progress))
    if sha256 and source is None:
        raise RequestError("the SHA-256 of the shards needs the shards", hint="give a `source`")
    if with_gguf_py and source is None:
        raise RequestError("gguf-py reads the source, and there is none", hint="give a `source`")
    try:
        data = read_manifest(Path(path))
        try:
            described = manifest.decode(data, str(Path(path, manifest.NAME)))
        except PackError as error:
            if error.place in ("format", "format_version"):
                raise
            return _without_manifest(Path(path), error)
        return _Verification(Path(path), described).run(source, options)
    except MemoryError:
        raise MachineError("not enough memory", path=path, hint="use fewer `threads`") from None


def _without_manifest(path: Path, error: PackError) -> Report:
    """Report a manifest that cannot be decoded: nothing else can be looked at."""
    findings = Findings()
    findings.add_error("manifest", error, file=manifest.NAME)
    return Report(
        passed=False,
        headline="manifest.json cannot be read",
        path=str(path),
        findings=findings.in_order(),
        layers=(),
        checked_layers=(),
        blob_count=0,
        part_count=0,
        tensor_count=0,
        checked_blob_count=0,
        checked_tensor_count=0,
        read_length=0,
        data_length=0,
        compared_length=None,
        sha256_count=None,
        gguf_py_length=None,
        not_looked_at=("all that manifest and index would list",),
    )


def _witness(source: PathOrPaths) -> Witness:
    paths = [str(path) for path in find_shards(source)]
    return hear(paths, sort=len(listed(source)) > 1)


class _Verification:
    """One verification: it collects findings, and what was not looked at."""

    def __init__(self, path: Path, described: Manifest) -> None:
        self.path = path
        self.manifest = described
        self.findings = Findings()
        self.not_looked_at: list[str] = []
        self.unread: set[int] = set()
        self.unproven: set[int] = set()
        self.short_files: set[int] = set()
        self.comparison: Comparison | None = None
        self.sha256_count: int | None = None
        self.gguf_py_length: int | None = None
        self.mirror_length: int | None = None

    def run(self, source: PathOrPaths | None, options: _Options) -> Report:
        witness = None if source is None else _witness(source)
        if not self.manifest.digest_matches:
            self.findings.add("manifest", "its own digest differs", file=manifest.NAME)
        index = agreement.open_index(self.path, self.manifest, self.findings)
        if index is None:
            self.not_looked_at.append("all that the index would list")
            return self._report(None, None, None)
        agreement.check(index, self.manifest, self.findings)
        chosen = scope.choose(index, options.layers, options.sample, options.seed)
        self.not_looked_at += chosen.not_looked_at
        origins.check(index, self.manifest, self.findings)
        paths = [self.path / file.name for file in index.files]
        sources = inventory.NO_SOURCES
        if witness is not None:
            self.comparison = Comparison(index, self.manifest, witness, paths, self.findings)
            self.comparison.check()
            if self.comparison.is_another_model:
                self.not_looked_at.append("the bytes of the source")
            else:
                sources = self.comparison.sources()
        items = inventory.take(index, self.manifest, sources, self.findings)
        work = self._work(index, items, chosen)
        if options.sha256 and witness is not None:
            self._check_sha256(witness, options.threads)
        if self.unread:
            count = f"{len(self.unread):,} blobs and tensors"
            self.not_looked_at.append(f"the bytes of {count} that are lost or have no digest")
        if self.unproven:
            count = f"{len(self.unproven):,} blobs and tensors"
            self.not_looked_at.append(
                f"the bytes of {count}: the index links to these very files, and has no digests to"
                " compare them with"
            )
        opinion = self._ask_gguf_py(index, witness) if options.with_gguf_py else None
        mirrored = self._mirrored(index, items, chosen)
        scan = self._scan(index, work, mirrored, witness, opinion, options)
        self.gguf_py_length = None if opinion is None else scan.second_length
        self.findings.drop_consequences()
        if witness is None and not self.findings.all and chosen.items is None:
            self._check_sha256_of_pack(index, paths, options)
        return self._report(index, scan, chosen)

    def _work(self, index: Index, items: Sequence[list[Item]], chosen: Scope) -> list[Run | Gap]:
        """List what is to be read, as far as the files on disk have it."""
        work: list[Run | Gap] = []
        for number, file in enumerate(index.files):
            if file.is_second and not (self.path / file.name).exists():
                continue
            length = self._length_on_disk(number, self.path / file.name, file.length, items[number])
            held = items[number]
            if chosen.items is not None:
                held = [i for i in held if i.number is None or i.number in chosen.items]
            if length < file.length:
                _note((item for item in held if item.end > length), self.unread)
                held, length = cut(held, length)
            if file.is_shard:
                unknown = [item for item in held if not _can_be_checked(item)]
                is_same = self.comparison is not None and number in self.comparison.same_files
                _note(unknown, self.unproven if is_same else self.unread)
                held = [item for item in held if _can_be_checked(item)]
            if not length:
                continue
            if file.is_shard or chosen.items is not None:
                work += item_runs(number, held)
            else:
                work += whole_runs(number, held, min(length, file.length))
        if chosen.items is None:
            work += self._gaps_of_shards(index)
        comparison = self.comparison
        if comparison is not None and not comparison.is_another_model and chosen.items is None:
            work += comparison.gaps() if index.is_whole else ()
        return work

    def _gaps_of_shards(self, index: Index) -> Iterator[Run]:
        """Yield the ranges of files that are shards which no record covers: they are zeros."""
        if not self.manifest.is_whole or not any(file.is_shard for file in index.files):
            return
        try:
            shards = map_shards(Description(self.path, self.manifest, index))
        except PackError:  # a finding of its own
            return
        for shard in shards:
            for number in sorted({piece.file for piece in shard.pieces}):
                file = index.files[number]
                is_sound = file.length == shard.length and number not in self.short_files
                if file.is_shard and is_sound:
                    pieces = ((piece.shard_offset, piece.end) for piece in shard.pieces)
                    for start, end in gaps(0, shard.length, pieces):
                        yield Run(number, start, end, ())

    def _length_on_disk(self, number: int, path: Path, stated: int, items: Sequence[Item]) -> int:
        """Return how long a file is; what it is not, or that there is none, is a finding."""
        try:
            descriptor = open_regular(path)
            try:
                length = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        except OSError as error:
            if is_shortage(error):
                raise MachineError(f"cannot open: {error.strerror}", path=path) from None
            self.findings.add("file", f"cannot open: {error.strerror}", file=path.name)
            self.short_files.add(number)
            return 0
        if length == stated:
            return length
        self.short_files.add(number)
        message = f"it is {length:,} bytes long, the index says {stated:,}"
        lost = sum(item.end > length for item in items)
        if lost:
            message += f": {lost:,} of {len(items):,} blobs and tensors in it are cut or missing"
        self.findings.add("file", message, file=path.name, offset=min(length, stated))
        return length

    def _check_sha256(self, witness: Witness, threads: int) -> None:
        """Compare the SHA-256 of the shards with those that the manifest states."""
        entries = self.manifest.source.shards
        if not all(entry.sha256 for entry in entries):
            self.not_looked_at.append("the SHA-256 of shards for which the manifest states none")
        pairs = [
            (entry, shard)
            for entry, shard in zip(entries, witness.shards, strict=False)
            if entry.sha256
        ]
        with ThreadPool(max_workers=threads) as executor:
            computed = list(executor.map(sha256_of, [shard.path for _, shard in pairs]))
        shards = [(entry, os.path.basename(shard.path)) for entry, shard in pairs]
        self._compare_sha256(shards, computed)

    def _check_sha256_of_pack(self, index: Index, paths: Sequence[Path], options: _Options) -> None:
        """Compare the SHA-256 of the shards that a sound, whole pack is restored to."""
        entries = [entry for entry in self.manifest.source.shards if entry.sha256]
        if not self.manifest.is_whole or not entries:
            return
        names = {entry.name for entry in entries}
        maps = map_shards(Description(self.path, self.manifest, index))
        shards = [shard for shard in maps if shard.name in names]
        try:
            computed = sha256_of_shards(paths, shards, options.threads, options.phases.begin())
        except (OSError, EOFError) as error:
            self.findings.add("file", f"cannot read: {error}")
            return
        self._compare_sha256([(entry, entry.name) for entry in entries], computed)

    def _compare_sha256(
        self, shards: Sequence[tuple[ShardEntry, str]], computed: Sequence[str]
    ) -> None:
        self.sha256_count = 0
        for (entry, name), sha256 in zip(shards, computed, strict=True):
            if sha256 == entry.sha256:
                self.sha256_count += 1
            else:
                message = f"its SHA-256 is {sha256}, the manifest says {entry.sha256}"
                self.findings.add("source", message, file=name)

    def _mirrored(
        self, index: Index, items: Sequence[list[Item]], chosen: Scope
    ) -> tuple[Mirror, list[Run]] | None:
        """List what is to be read of the pack's mirror; None without one that can be read."""
        mirror = find_mirror(self.path, index)
        if mirror is None:
            return None
        if mirror.problem is not None:
            self.not_looked_at.append(f"its mirror in {mirror.path}: {mirror.problem}")
            return None
        return mirror, mirrored_runs(index, items, mirror, chosen.items)

    def _scan(
        self,
        index: Index,
        work: Sequence[Run | Gap],
        mirrored: tuple[Mirror, list[Run]] | None,
        witness: Witness | None,
        opinion: SecondOpinion | None,
        options: _Options,
    ) -> Scan:
        every = (*work, *(mirrored[1] if mirrored else ()))
        total = sum(run.end - run.start for run in every if isinstance(run, Run))

        progress = options.phases.begin()

        def advanced(length: int) -> None:
            progress(length, total)

        shard_paths = [] if witness is None else [shard.path for shard in witness.shards]
        paths = [self.path / file.name for file in index.files]
        scan = Scan(paths, shard_paths, advanced, self.findings, opinion)
        scan.run(work, options.threads)
        if mirrored is not None:
            mirror, runs = mirrored
            self.mirror_length, wrong = scan_mirror(index, mirror, runs, options.threads, advanced)
            self.findings.all += wrong.all
        return scan

    def _ask_gguf_py(self, index: Index, witness: Witness | None) -> SecondOpinion | None:
        """Let gguf-py read the source too; None where it is not the pack's."""
        if witness is None or (self.comparison and self.comparison.is_another_model):
            return None
        from moepack.verifying.gguf_py import Opinion  # here, since it brings numpy and gguf

        opinion = Opinion(index, [shard.path for shard in witness.shards], self.findings)
        self.not_looked_at += opinion.not_looked_at
        return opinion.piece

    def _report(self, index: Index | None, scan: Scan | None, chosen: Scope | None) -> Report:
        families = () if index is None else index.families
        blob_count = sum(family.expert_count for family in families)
        tensor_count = 0 if index is None else index.tensor_count
        checked = frozenset[int]() if chosen is None else chosen.items
        if checked is None:
            checked = frozenset(range(blob_count + tensor_count))
        checked -= self.unread | self.unproven
        layers = dict.fromkeys(family.layer for family in families)
        skipped = {
            family.layer
            for family in families
            if not checked.issuperset(
                range(family.first_blob, family.first_blob + family.expert_count)
            )
        }
        checked_blob_count = sum(number < blob_count for number in checked)
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
            blob_count=blob_count,
            part_count=sum(family.expert_count * len(family.part_kinds) for family in families),
            tensor_count=tensor_count,
            checked_blob_count=checked_blob_count,
            checked_tensor_count=len(checked) - checked_blob_count,
            read_length=scan.read_length if scan else 0,
            data_length=0 if index is None else sum(file.length for file in index.files),
            compared_length=scan.compared_length if scan and self.comparison else None,
            sha256_count=self.sha256_count,
            gguf_py_length=self.gguf_py_length,
            not_looked_at=tuple(self.not_looked_at),
            mirror_length=self.mirror_length,
        )


def _note(items: Iterable[Item], left_out: set[int]) -> None:
    """Count items whose bytes cannot be looked at as left out."""
    left_out.update(item.number for item in items if item.number is not None)


def _can_be_checked(item: Item) -> bool:
    return any(
        any(known is not None for known in (extent.digest, extent.source, extent.strong))
        for extent in item.extents
    )
