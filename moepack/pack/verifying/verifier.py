"""Verify a pack: its structure, its padding, every digest, and every byte against the source.

Verification shares the index decoder with the reader, and with the packer only how the files of a
model are named: it learns from `witness` where everything lies in them. It returns all findings and
stops at none, as long as the manifest and the tables of the index can be read at all.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from moepack.common.errors import MachineError, RequestError
from moepack.common.paths import PathOrPaths, path_list
from moepack.common.phases import Phases, Progress, advancing
from moepack.common.share import Share
from moepack.pack.reading.copies import Mirror, find_mirror
from moepack.pack.reading.directory import pack_folder
from moepack.pack.verifying import headline, inventory, shard_sha256
from moepack.pack.verifying.agreement import open_pack
from moepack.pack.verifying.checked_pack import CheckedPack, Gap, Segment
from moepack.pack.verifying.comparison import SourceComparison
from moepack.pack.verifying.report import Findings, Report
from moepack.pack.verifying.scan import Scanned, scan
from moepack.pack.verifying.witness import read_shards
from moepack.pack.verifying.work import choose, list_work
from moepack.source.shards import find_shards
from moepack.storage.extents import RangeSet
from moepack.storage.thread_pool import ThreadPool

DEFAULT_THREADS = 4


def verify(
    path: str | os.PathLike[str],
    source: PathOrPaths | None = None,
    *,
    layers: str | Iterable[int] | None = None,
    sha256: bool = False,
    with_gguf_py: bool = False,
    part: str | tuple[int, int] | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> Report:
    """Verify the pack at `path`, and compare it with the source that it was made from, if given.

    `source` is any one shard, a folder, or all shards. Index, manifest and the shards' headers are
    always checked; of the bytes, those of `layers` (`0-3,7`, or numbers) if given. With `sha256`
    the shards are read once more to compare their SHA-256 with the manifest; `with_gguf_py`
    compares the same blobs and tensors with the gguf package's reading of the source. Of a partial
    pack (see `moepack pull`) the bytes that are here are checked. `progress` is called from one
    thread at a time.

    With `part`, such as `3/16` or (3, 16), only that share of the bytes is read: all parts have
    like lengths, and together they look at everything once, on many machines or night by night.

    Raises PackError if there is no pack or one of an unknown version, SourceError for a shard that
    cannot be read, RequestError for options that make no sense, MachineError if the machine lacks
    memory, threads or open files; every other fault is a finding.
    """
    if source is None and (sha256 or with_gguf_py):
        subject = "the SHA-256 of shards" if sha256 else "gguf-py"
        raise RequestError(f"{subject} needs a source to read", hint="give a `source`")
    share = None if part is None else Share(part)
    findings = Findings()
    try:
        folder = pack_folder(path)
        described, pack = open_pack(folder, findings)
        if described is None:
            problem = "manifest.json cannot be read"
            return _unreadable(folder, findings, problem, "all that manifest and index would list")
        witness = None
        if source is not None:
            paths = [str(shard) for shard in find_shards(source)]
            witness = read_shards(paths, sort=len(path_list(source)) > 1)
        if pack is None:
            common = headline.write(findings.all, described, None, is_all=False)
            return _unreadable(folder, findings, common, "all that the index would list")
        choose(pack, layers)
        comparison = None if witness is None else SourceComparison(pack, witness)
        phases = Phases(progress)
        return _verify(pack, comparison, share, threads, phases, sha256, with_gguf_py)
    except MemoryError:
        raise MachineError("not enough memory", path=path, hint="use fewer `threads`") from None


def _unreadable(
    folder: Path, findings: Findings, problem: str | None, not_looked_at: str
) -> Report:
    return Report(
        passed=False,
        headline=problem,
        path=str(folder),
        findings=findings.in_order(),
        not_looked_at=(not_looked_at,),
    )


def _verify(
    pack: CheckedPack,
    comparison: SourceComparison | None,
    share: Share | None,
    threads: int,
    phases: Phases,
    sha256: bool,
    with_gguf_py: bool,
) -> Report:
    if comparison is not None and comparison.is_another_model:
        pack.not_looked_at.append("the bytes of the source")
    files = inventory.list_segments(pack, comparison)
    inventory.check_origins(pack, files)
    work, of_others, unchecked = list_work(pack, files, share, comparison)
    shard_paths = [] if comparison is None else comparison.shard_paths
    sha256_count = _check_sha256(pack, shard_paths, share, threads) if sha256 else None
    opinion = None
    if with_gguf_py and comparison is not None and not comparison.is_another_model:
        from moepack.pack.verifying.gguf_py import Opinion  # here, since it brings numpy and gguf

        opinion = Opinion(pack, shard_paths).piece
    mirror, mirrored = _mirror(pack, files, of_others)
    total = sum(one.end - one.start for one in (*work, *mirrored) if isinstance(one, Segment))
    advanced = advancing(phases.begin(), total)
    scanned = scan(pack.paths, shard_paths, work, threads, advanced, opinion)
    pack.findings.all += scanned.findings
    mirror_length = None
    if mirror is not None:
        copies = [mirror.path / file.name for file in pack.index.files]
        of_mirror = scan(copies, [], mirrored, threads, advanced)
        mirror_length = of_mirror.read_length
        pack.findings.all += [
            finding._replace(kind="mirror", message=f"in the mirror {finding.message}")
            for finding in of_mirror.findings
        ]
    pack.findings.drop_consequences()
    if pack.chosen is None and not (comparison or share or pack.findings.all):
        sha256_count = shard_sha256.check_restored(pack, threads, phases)
    report = _report(pack, comparison, scanned, unchecked)
    return report._replace(
        sha256_count=sha256_count,
        gguf_py_length=scanned.second_length if opinion else None,
        mirror_length=mirror_length,
    )


def _check_sha256(
    pack: CheckedPack, shard_paths: Sequence[str], share: Share | None, threads: int
) -> int:
    """Compare the SHA-256 of the shards with the manifest; return how many are equal."""
    entries = pack.manifest.source.shards
    if not all(entry.sha256 for entry in entries):
        reason = "the SHA-256 of shards for which the manifest states none"
        pack.not_looked_at.append(reason)
    shards = zip(entries, shard_paths, strict=False)
    expected = {path: entry.sha256 for entry, path in shards if entry.sha256}
    paths = list(expected) if share is None else share.names(dict.fromkeys(expected, 1))
    with ThreadPool(max_workers=threads) as pool:
        computed = list(pool.map(shard_sha256.sha256_of, paths))
    names = [os.path.basename(path) for path in paths]
    sums = [expected[path] for path in paths]
    return shard_sha256.count_equal(names, sums, computed, pack.findings)


def _mirror(
    pack: CheckedPack, files: Sequence[Sequence[Segment]], of_others: set[int]
) -> tuple[Mirror | None, Sequence[Segment | Gap]]:
    """Return the mirror, if there is one that can be read, and the chosen segments in it."""
    mirror = find_mirror(pack.path, pack.index)
    if mirror is not None and mirror.problem is not None:
        pack.not_looked_at.append(f"its mirror in {mirror.path}: {mirror.problem}")
        mirror = None
    if mirror is None:
        return None, ()
    assert mirror.record is not None
    segments = []
    for file, of_file in zip(pack.index.files, files, strict=True):
        coverage = RangeSet(mirror.record.ranges(file.name))
        for one in of_file:
            is_chosen = pack.chosen is None or one.number in pack.chosen
            is_chosen = is_chosen and one.number not in of_others
            if one.number is not None and is_chosen and coverage.covers(one.start, one.end):
                ranges = tuple(checked._replace(source=None) for checked in one.ranges)
                segments.append(one._replace(ranges=ranges))
    return mirror, segments


def _report(
    pack: CheckedPack,
    comparison: SourceComparison | None,
    scanned: Scanned,
    unchecked: set[int],
) -> Report:
    index = pack.index
    checked = pack.chosen
    if checked is None:
        checked = frozenset(range(index.blob_count + index.tensor_count))
    checked -= unchecked
    layers = dict.fromkeys(family.layer for family in index.families)
    skipped = {
        family.layer
        for family in index.families
        if not checked.issuperset(range(family.first_blob, family.first_blob + family.expert_count))
    }
    checked_blob_count = sum(number < index.blob_count for number in checked)
    findings = pack.findings.in_order()
    is_all = not pack.not_looked_at
    return Report(
        passed=False if findings else True if is_all else None,
        headline=headline.write(findings, pack.manifest, comparison, is_all=is_all),
        path=str(pack.path),
        findings=findings,
        layers=tuple(layers),
        checked_layers=tuple(layer for layer in layers if layer not in skipped),
        blob_count=index.blob_count,
        part_count=index.part_count,
        tensor_count=index.tensor_count,
        checked_blob_count=checked_blob_count,
        checked_tensor_count=len(checked) - checked_blob_count,
        read_length=scanned.read_length,
        data_length=sum(file.length for file in index.files),
        compared_length=scanned.compared_length if comparison else None,
        not_looked_at=tuple(pack.not_looked_at),
    )
