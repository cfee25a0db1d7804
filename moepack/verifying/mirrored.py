"""The mirror of a pack: experts a second time, by the digests that they have in the pack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from moepack.format.index import Index
from moepack.reading.mirror import Coverage, Mirror
from moepack.verifying.extents import Item, Run, item_runs
from moepack.verifying.report import Findings
from moepack.verifying.scan import Scan


def mirrored_runs(
    index: Index,
    items: Sequence[Sequence[Item]],
    mirror: Mirror,
    numbers: Collection[int] | None,
) -> list[Run]:
    """List what a mirror says that it has of the `items` of each file.

    Of blobs with certain `numbers` alone, where these are given.
    """
    assert mirror.description is not None
    ranges = mirror.description.ranges
    runs: list[Run] = []
    for number, file in enumerate(index.files):
        coverage = Coverage(ranges.get(file.name, ()))
        runs += item_runs(number, _mirrored(items[number], coverage, numbers))
    return runs


def _mirrored(
    items: Sequence[Item], coverage: Coverage, numbers: Collection[int] | None
) -> Iterator[Item]:
    for item in items:
        is_wanted = item.number is not None and (numbers is None or item.number in numbers)
        if is_wanted and coverage.holds(item.start, item.end):
            extents = tuple(extent._replace(source=None) for extent in item.extents)
            yield item._replace(extents=extents)


def scan_mirror(
    index: Index,
    mirror: Mirror,
    runs: Sequence[Run],
    threads: int,
    advanced: Callable[[int], None],
) -> tuple[int, Findings]:
    """Read experts in a mirror; return the bytes read, and what is wrong, of the kind `mirror`."""
    findings = Findings()
    scan = Scan([mirror.path / file.name for file in index.files], [], advanced, findings)
    scan.run(runs, threads)
    findings.all = [
        finding._replace(kind="mirror", message=f"in the mirror {finding.message}")
        for finding in findings.all
    ]
    return scan.read_length, findings
