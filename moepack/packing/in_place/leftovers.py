"""Leftovers of a run in place that ended between its last byte and its last step.

The model is whole then: as a pack, or as shards. Drafts and journal are of no more use, unless the
pack was damaged since, or is to go back.
"""

from __future__ import annotations

from pathlib import Path

from moepack.common.errors import PackError
from moepack.common.phases import Phases, Progress
from moepack.pack.format import manifest
from moepack.pack.reading.pack import Pack
from moepack.pack.verifying.verifier import verify
from moepack.packing.in_place import draft as drafts
from moepack.packing.in_place.draft import Draft
from moepack.packing.in_place.unfinished import (
    Unfinished,
    is_unfinished,
    is_untouched,
    is_whole_pack,
)


def settle(path: Path, threads: int, progress: Progress | None = None) -> bool:
    """Remove leftovers beside a whole pack or whole shards; return whether they were whole.

    No byte of the model is touched. A pack is read before; raises PackError if it is damaged, and
    leaves everything there.
    """
    if not is_unfinished(path):
        return False
    unfinished = Unfinished(path)
    try:
        if not is_untouched(path):
            return False
        if (path / manifest.NAME).exists():
            _require_sound(unfinished, threads, progress)
        unfinished.clean_up()
        return True
    finally:
        unfinished.close()


def _require_sound(unfinished: Unfinished, threads: int, progress: Progress | None) -> None:
    """Read a whole pack; write a damaged manifest or index anew, which its drafts have."""
    path, phases = unfinished.path, Phases(progress)
    report = verify(path, threads=threads, progress=phases.begin())
    if any(finding.kind in ("manifest", "index") for finding in report.findings):
        unfinished.commit(drafts.read(unfinished.inner, path))
        report = verify(path, threads=threads, progress=phases.begin())
    if not report.passed:
        first = report.findings[0]
        raise PackError(
            f"the pack is damaged: {report.headline or first.message}",
            path=path,
            place=first.place or None,
            hint=f"nothing was removed; `moepack verify {path}` names all of the damage",
        )


def read_draft(unfinished: Unfinished) -> Draft:
    """Return the draft; that of a whole pack is in the pack, too. Raises PackError."""
    path = unfinished.path
    try:
        return drafts.read(unfinished.inner, path)
    except PackError:
        if not is_whole_pack(path):
            raise
    with Pack(path) as pack:
        return drafts.decode(path, pack.manifest_bytes, pack.index_bytes)
