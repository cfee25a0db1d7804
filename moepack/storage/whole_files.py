"""New files of known bytes that appear under their names when they are whole.

Restoring and exporting know the digest of everything that they write. So they need no journal: the
files of an interrupted run are read, correct runs in them stay, and the rest is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import not_
from pathlib import Path
from typing import NamedTuple

from moepack.common import digest
from moepack.common.errors import PackError, RequestError, write_failure
from moepack.common.pack_files import is_in_pack
from moepack.common.phases import DigestCounts, Progress, advancing
from moepack.storage.atomic import publish, refuse_special, require_folder_of, sync_directory
from moepack.storage.blocks import can_clone
from moepack.storage.copying import Copier
from moepack.storage.extents import FinishedFile, NewFile, is_whole
from moepack.storage.folders import check_space, lock
from moepack.storage.inputs import Inputs
from moepack.storage.libc import sync_file_system
from moepack.storage.regular_file import open_regular
from moepack.storage.thread_pool import run_each

SUFFIX = ".partial"
_MANY, _SMALL_LENGTH = 32, 64 << 20
"""More files than this, shorter than that on average, are synced together."""
MAX_NAME_LENGTH = 255
"""In bytes: that of Linux."""


class WholeFilesResult(NamedTuple):
    """Lengths in bytes: of all files, of the parts shared with inputs, of the parts from before.

    `digests` counts what was compared.
    """

    length: int
    cloned_length: int
    kept_length: int
    digests: DigestCounts = DigestCounts()


def write_whole_files(
    folder: Path,
    files: Sequence[NewFile],
    inputs: Sequence[Path],
    *,
    data: Sequence[bytes] = (),
    check: Callable[[Path, str], None] | None = None,
    resume: bool = False,
    force: bool = False,
    clone: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> WholeFilesResult:
    """Write `files` into `folder`, each under a name ending in `.partial` until it is whole.

    `inputs` are the files of a pack that their extents name, `data` those inputs behind them that
    are in memory. `check` is called with each file that is whole and synced, and its name, before
    it gets that; it raises if something is wrong. With `resume` the files of an interrupted run are
    continued, and a file that is whole already stays; with `force` files of these names are
    replaced, but never those of a pack. With `clone` ranges are shared with the files of the pack,
    where the file system can, and not read.

    Raises RequestError for an existing file, PackError for a pack whose bytes differ from its
    index, MachineError for a machine that cannot.
    """
    total = sum(file.length for file in files)
    advanced = advancing(progress, total)

    def is_there(file: NewFile, advanced: Callable[[int], None]) -> bool:
        return is_whole(folder / file.name, file, advanced)

    with _resumable(folder, [file.name for file in files]):
        are_there = run_each(is_there, files, threads, advanced) if resume else [False] * len(files)
        kept = list(compress(files, are_there))
        missing = list(compress(files, map(not_, are_there)))
        _check_targets(folder, missing, inputs, resume, force)
        check_space(folder, needed_length(folder, missing, inputs if clone else ()))
        if check is not None:
            for file in kept:
                check(folder / file.name, file.name)
        with Inputs(inputs, PackError, data) as opened:
            left = sum(file.length for file in missing)
            are_small = len(missing) > _MANY and left < len(missing) * _SMALL_LENGTH
            copier = Copier(
                folder,
                opened,
                advanced,
                resume=resume,
                clone=clone,
                syncs=not are_small,
            )
            _write(missing, copier, check, threads)
    kept_length = copier.kept_length + sum(file.length for file in kept)
    known_length, unknown_length = _part_lengths(files)
    compared_length = copier.compared_length + _part_lengths(kept)[0]
    digests = DigestCounts(known_length, unknown_length, compared_length)
    return WholeFilesResult(total, copier.cloned_length, kept_length, digests)


def _part_lengths(files: Sequence[NewFile]) -> tuple[int, int]:
    """Return the bytes of parts with a digest, and of those without; only parts have labels."""
    known_length = unknown_length = 0
    for file in files:
        for extent in file.extents():
            if extent.digest is not None:
                known_length += extent.length
            elif extent.label:
                unknown_length += extent.length
    return known_length, unknown_length


def _write(
    files: Sequence[NewFile],
    copier: Copier,
    check: Callable[[Path, str], None] | None,
    threads: int,
) -> None:
    """Write files, and give them their names: each when it is synced, or all together."""
    folder = copier.target
    names = {partial_name(file.name): file.name for file in files}
    unsynced: list[FinishedFile] = []

    def complete(file: FinishedFile) -> None:
        name = names[file.name]
        if check is not None:
            check(folder / file.name, name)
        publish(folder / file.name, folder / name, syncs_folder=copier.syncs)

    partials = [file._replace(name=partial_name(file.name)) for file in files]
    copier.write(partials, threads, complete if copier.syncs else unsynced.append)
    if unsynced:
        sync_file_system(folder)
        for file in unsynced:
            complete(file)
        sync_directory(folder)


def partial_name(name: str) -> str:
    """Return the name of a file until it is whole; never longer than a name can be."""
    if len(os.fsencode(name + SUFFIX)) <= MAX_NAME_LENGTH:
        return name + SUFFIX
    return f"{digest.xxh3(os.fsencode(name)):016x}{SUFFIX}"


def _check_targets(
    folder: Path, files: Sequence[NewFile], inputs: Sequence[Path], resume: bool, force: bool
) -> None:
    """Remove useless leftovers of an interrupted run; raise RequestError, PackError for others."""
    names = {file.name for file in files} | {partial_name(file.name) for file in files}
    if len(names) < 2 * len(files):
        problem = "two files would get the same name"
        raise PackError(problem, path=folder, found=", ".join(file.name for file in files))
    for file in files:
        check_target(folder / file.name, inputs, resume=resume, force=force)
        partial = folder / partial_name(file.name)
        refuse_special(partial)
        if not os.path.lexists(partial) or resume:
            continue
        if not force:
            hint = "continue it with `resume=True`, or begin again with `force=True`"
            raise RequestError("an interrupted run left this file", path=partial, hint=hint)
        if partial.is_symlink():
            partial.unlink()
            continue
        with open(partial, "rb", opener=open_regular) as leftover:
            lock(leftover.fileno(), partial)  # raises if that run goes on
            partial.unlink()


def check_target(path: Path, inputs: Sequence[Path], *, resume: bool, force: bool) -> None:
    """Raise RequestError if no file may be written at `path`; `inputs` are read meanwhile."""
    require_folder_of(path)
    if not os.path.lexists(path):
        return
    if path.is_dir():
        raise RequestError("a folder has this name", path=path, hint="choose another place")
    refuse_special(path)
    if path.exists() and any(other.exists() and path.samefile(other) for other in inputs):
        raise RequestError("is one of the files to read", path=path, hint="choose another place")
    if is_in_pack(path):
        hint = "choose another place; `force` has no effect"
        raise RequestError("a file of a pack is never overwritten", path=path, hint=hint)
    if not force:
        problem = "exists already" + (", and is not the file that would be written" * resume)
        hint = "choose another place, or replace it with `force=True`"
        raise RequestError(problem, path=path, hint=hint)


def needed_length(folder: Path, files: Sequence[NewFile], inputs: Sequence[Path]) -> int:
    """Return the bytes of space that writing takes, beyond those written already.

    Those that are shared with `inputs` take none.
    """
    largest = max(filter(os.path.isfile, inputs), key=os.path.getsize, default=None)
    shares = largest is not None and can_clone(largest, folder)
    needed = 0
    for file in files:
        partial = folder / partial_name(file.name)
        on_disk = 512 * os.stat(partial).st_blocks if partial.exists() else 0
        if shares:
            extents = (e for e in file.extents() if e.input < len(inputs) and e.is_blocks)
            on_disk = max(on_disk, sum(extent.length for extent in extents))
        needed += max(0, file.length - on_disk)
    return needed


@contextmanager
def _resumable(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Turn errors of the system while writing into a MachineError with a hint how to go on."""
    hint = "run the same again with `resume=True` to continue"
    partials = [partial_name(name) for name in names]
    try:
        yield
    except OSError as error:
        has_begun = any(os.path.lexists(folder / name) for name in (*partials, *names))
        raise write_failure(error, folder, hint if has_begun else None) from error
    except KeyboardInterrupt as stop:
        stop.add_note(hint)
        raise
    except PackError as error:
        left = [name for name in partials if (folder / name).exists()]
        if left:
            shown = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
            error.add_note(f"what was written stays, for `resume=True`: {shown} in {folder}")
        raise
