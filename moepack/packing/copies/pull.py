"""Pull a pack from a store or a web server onto this machine: all of it, some layers, the hottest.

The order of events is the promise:

1. `.pull.json` is written, with no bytes named, then manifest (under another name) and index;
2. ranges come and are compared with their digests; they are synced, and then named in `.pull.json`;
3. if everything is there, what came is read back from the drive, and the manifest gets its name:
   this is the commit; `.pull.json` is removed.

Whatever ends it early leaves a partial pack that can be used as far as it goes, and the same
command goes on from there. The record names the mtime of each file: those that were changed since,
by a pull that was killed or by anybody else, are read and compared before they are trusted. The
pull that completes the pack reads all that it keeps before it commits, padding included. What is
whole already is left alone: `repair` reads it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moepack.common import digest
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError, write_failure
from moepack.common.pack_files import JOURNAL_NAME
from moepack.common.paths import AnyPath, is_remote
from moepack.common.phases import DigestCounts, Phases, Progress
from moepack.common.sizes import Size, parse_layers, ranges_text
from moepack.pack.format import manifest
from moepack.pack.reading.copies import (
    PARTIAL_MANIFEST,
    PARTIAL_RECORD,
    CopyRecord,
    CopyRequest,
    load_partial,
)
from moepack.pack.reading.directory import read_manifest
from moepack.pack.reading.pack import Pack
from moepack.packing.copies.packed_items import choose
from moepack.packing.copies.subset_copy import SubsetCopy, write_record
from moepack.packing.writing.commit import (
    TEMPORARY_NAME,
    commit,
    is_on_drive,
    settling,
    write_proven,
)
from moepack.storage.atomic import make_folder, require_folder_of, sync_directory
from moepack.storage.folders import check_space, locked_folder

DEFAULT_THREADS = 16
_GO_ON = "run the same command again: it goes on from what is there"


@dataclass(frozen=True, slots=True)
class PullSummary:
    """The pack at `origin` as far as it is at `path` now; lengths are bytes.

    If it `is_whole`, it is that pack. Else `layers` are those with all their experts here, and
    `missing_layers` those without any. `kept_length` was there before, `fetched_length` came now,
    None if that is only planned. `mended_length` was there, damaged, and is right again. `digests`
    counts the bytes of parts that are here.
    """

    path: str
    origin: str
    is_whole: bool
    layers: tuple[int, ...]
    missing_layers: tuple[int, ...]
    expert_count: int
    all_expert_count: int
    length: int
    all_length: int
    kept_length: int
    fetched_length: int | None
    mended_length: int
    digests: DigestCounts


def pull(
    pack: AnyPath | None,
    target: AnyPath,
    *,
    layers: str | Iterable[int] | None = None,
    hottest: Size | None = None,
    resume: bool = False,
    threads: int = DEFAULT_THREADS,
    planned: Callable[[PullSummary], None] | None = None,
    progress: Progress | None = None,
) -> PullSummary:
    """Bring a pack from a store or a web server into the directory `target`, checked as it comes.

    With `layers` (`0-20`, or numbers) or `hottest` (`40GiB`, or `25%` of the experts) the dense
    part comes, and those experts: a partial pack, which opens as a pack does, and whose other
    experts are read from `pack`. What is there already is kept, unread; of files that were changed
    since, as far as it has the right digests. The call that completes the pack reads and compares
    everything there, and what is wrong comes again. With `resume` the choices are the earlier ones,
    and `pack` may be None. `threads` are the ranges that are asked for at a time.

    `planned` is called with the bytes that will be there before any comes, `progress` with the
    bytes done since its last call and with those to do in all, from one thread at a time.

    Raises PackError for a pack that is damaged there or not the one that a part of is here,
    RequestError for a target that is something else, MachineError if the store or this machine
    fails; the same call goes on then.
    """
    folder = Path(target)
    record = _record_in(folder)
    request = _request(layers, hottest)
    if resume and record is not None and request is None:
        request = record.request
    if pack is None:
        if record is None:
            raise RequestError("nothing to resume", path=folder, hint="name the pack to pull")
        pack = record.origin
    if not is_remote(pack):
        hint = "a pack of this machine is copied like any folder"
        raise RequestError("not the address of a pack in a store", path=pack, hint=hint)
    with Pack(pack) as opened:
        is_whole = (folder / manifest.NAME).exists()
        if is_whole:  # a record beside it was left by a pull that was killed when it was done
            record, request, hottest = None, None, None
        work = _Pull(opened, folder, record, request or CopyRequest(is_all=True), hottest)
        if is_whole:
            if read_manifest(folder) != opened.manifest_bytes:
                hint = "choose another directory, or remove it"
                raise RequestError("another pack is here already", path=folder, hint=hint)
            return work.unread()
        return work.run(threads, planned, progress)


def _request(layers: str | Iterable[int] | None, hottest: Size | None) -> CopyRequest | None:
    """Return the layers that are asked for; None for neither layers nor the hottest."""
    if layers is None and hottest is None:
        return None
    return CopyRequest(is_all=False, layers=parse_layers(layers or ()))


def _record_in(folder: Path) -> CopyRecord | None:
    """Return the record of a partial pack; None for none, or a damaged one, which is made anew."""
    try:
        return load_partial(folder)
    except (PackError, OSError):
        return None


class _Pull:
    """One pull of an open pack into a directory, which may have a part of it by its `record`."""

    def __init__(
        self,
        pack: Pack,
        folder: Path,
        record: CopyRecord | None,
        request: CopyRequest,
        hottest: Size | None,
    ) -> None:
        self._pack = pack
        self._folder = folder
        self._record = record
        self._digest = digest.xxh3(pack.manifest_bytes)
        self._copy = SubsetCopy(pack, folder)
        self._copy.require_pack()
        if hottest is not None:
            request = request._replace(hottest=pack.budget_length(hottest, "hottest"))
        self._request = request
        self._chosen = self._choose(request)

    def _choose(self, request: CopyRequest) -> list[int]:
        """Return the numbers of the items that are asked for. Raises RequestError."""
        missing = sorted(set(request.layers) - set(self._pack.layers))
        if missing:
            hint = f"it has layers {ranges_text(self._pack.layers)}"
            raise RequestError(f"the pack has no layer {missing[0]}", argument="layers", hint=hint)
        if request.hottest and not any(one.hotness_measured for one in self._pack.index.families):
            problem, hint = "no hotness was measured for it", "choose layers instead"
            raise RequestError(problem, path=self._pack.path, argument="hottest", hint=hint)
        items = self._copy.items
        experts = choose(self._pack, items, request)
        return [n for n, item in enumerate(items) if item.key is None or n in experts]

    def unread(self) -> PullSummary:
        """Return the summary of a pack that is whole here, by its manifest alone."""
        self._remove_record()
        everything = self._copy.all
        return self._summary(everything, kept=self._copy.length(everything))

    def run(
        self,
        threads: int,
        planned: Callable[[PullSummary], None] | None,
        progress: Progress | None,
    ) -> PullSummary:
        """Pull what is missing, and commit the pack if it is all here then."""
        self._check_target()
        if planned is not None:
            planned(self._summary(set(self._chosen), kept=0, fetched=None))
        if self._record is None and not self._folder.exists():  # so that nothing is left then
            check_space(self._folder, self._copy.length(self._chosen))
        try:
            make_folder(self._folder)
            with self._going_on(), locked_folder(self._folder):
                return self._carry_out(threads, Phases(progress))
        except OSError as error:
            raise write_failure(error, self._folder, _GO_ON) from error

    def _check_target(self) -> None:
        """Raise RequestError if something else is in the directory, or a part of another pack."""
        require_folder_of(self._folder)
        record = self._record
        if record is not None and record.pack_digest != self._digest:
            raise PackError(
                "a part of another pack is here, or of this one before it was made anew",
                path=self._folder,
                place=PARTIAL_RECORD,
                expected=digest.to_text(self._digest),
                found=digest.to_text(record.pack_digest),
                hint="choose another directory, or remove this one",
            )
        if not self._folder.is_dir():
            return
        ours = {f"{PARTIAL_RECORD}.tmp", PARTIAL_RECORD, PARTIAL_MANIFEST, TEMPORARY_NAME}
        names = set(os.listdir(self._folder)) - {"lost+found"}
        if JOURNAL_NAME in names or (names and not names & ours):
            raise RequestError(
                "not empty, and not a partial pack",
                path=self._folder,
                found=", ".join(sorted(names)[:3]),
                hint="choose a new or an empty directory",
            )

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Add to an error, or an interruption, how to go on."""
        try:
            yield
        except MoepackError as error:
            error.hint = _GO_ON if error.hint is None else f"{error.hint}; then {_GO_ON}"
            raise
        except KeyboardInterrupt as stop:
            stop.add_note(_GO_ON)
            raise

    def _carry_out(self, threads: int, phases: Phases) -> PullSummary:
        copy, record = self._copy, self._new_record()
        self._describe(record)
        mended_length = self._find_present(threads, phases)
        missing = [number for number in self._chosen if number not in copy.here]
        mended_length += copy.length(copy.named(record, unchanged=False).intersection(missing))
        kept_length = copy.length(copy.here)
        completes = copy.here.union(missing) >= copy.all
        fetched_length = copy.fetch(
            missing,
            range(len(self._pack.index.files)),
            threads,
            phases.begin(later=copy.part_length(missing) if completes else 0),
            lambda files: write_record(self._folder / PARTIAL_RECORD, record._replace(files=files)),
        )
        if completes:
            assert copy.here <= copy.compared, "what is kept is read before the commit"
            copy.prove(missing, threads, phases.begin())
            self._commit()
        return self._summary(
            copy.here, kept=kept_length, fetched=fetched_length, mended=mended_length
        )

    def _find_present(self, threads: int, phases: Phases) -> int:
        """Find what is here already; return how many bytes other than parts are wrong.

        If nothing would be missing afterwards, everything is read.
        """
        copy = self._copy
        later = copy.part_length(self._chosen)
        named = copy.named(self._record)
        copy.find(copy.all - named, threads, phases.begin(later=later))
        if not copy.here.union(named, self._chosen) >= copy.all:
            copy.here |= named
            return 0
        copy.find(named, threads, phases.begin(later=later))
        entry, index_bytes = self._pack.manifest.index_entry, self._pack.index_bytes
        is_right = is_on_drive(self._folder / entry.name, index_bytes)
        return copy.find_wrong_padding() + (0 if is_right else len(index_bytes))

    def _describe(self, record: CopyRecord) -> None:
        """Write what makes the folder a partial pack."""
        if self._record is None or self._record.request != record.request:
            write_record(self._folder / PARTIAL_RECORD, record)
        entry = self._pack.manifest.index_entry
        description = {PARTIAL_MANIFEST: self._pack.manifest_bytes}
        write_proven(self._folder, {**description, entry.name: self._pack.index_bytes})

    def _new_record(self) -> CopyRecord:
        """Return the record with this request added to the earlier ones."""
        request, record = self._request, self._record
        if record is not None:
            before = record.request
            request = CopyRequest(
                is_all=request.is_all or before.is_all,
                layers=tuple(sorted({*request.layers, *before.layers})),
                hottest=max(request.hottest, before.hottest),
            )
        files = {} if record is None else record.files
        return CopyRecord(str(self._pack.path), self._digest, request, files)

    def _commit(self) -> None:
        for file in self._pack.index.files:
            path = self._folder / file.name
            if os.stat(path, follow_symlinks=False).st_size != file.length:
                raise MachineError("the file was changed after it was written", path=path)
        entry = self._pack.manifest.index_entry
        commit(self._folder, entry.name, self._pack.index_bytes, self._pack.manifest_bytes)
        self._remove_record()

    def _remove_record(self) -> None:
        """Remove what only a partial pack has."""
        with settling(self._folder, "still has the record of its pull"):
            for name in (PARTIAL_RECORD, PARTIAL_MANIFEST):
                (self._folder / name).unlink(missing_ok=True)
            sync_directory(self._folder)

    def _summary(
        self, present: set[int], *, kept: int, fetched: int | None = 0, mended: int = 0
    ) -> PullSummary:
        are_here: dict[int, list[bool]] = {}
        for number, item in enumerate(self._copy.items):
            if item.key is not None:
                are_here.setdefault(item.key[0], []).append(number in present)
        return PullSummary(
            path=os.fspath(self._folder),
            origin=str(self._pack.path),
            is_whole=present >= self._copy.all,
            layers=tuple(layer for layer, experts in are_here.items() if all(experts)),
            missing_layers=tuple(layer for layer, experts in are_here.items() if not any(experts)),
            expert_count=sum(map(sum, are_here.values())),
            all_expert_count=sum(map(len, are_here.values())),
            length=self._copy.length(present),
            all_length=self._copy.length(self._copy.all),
            kept_length=kept,
            fetched_length=fetched,
            mended_length=mended,
            digests=self._copy.digest_counts(present),
        )
