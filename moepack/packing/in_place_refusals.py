"""What speaks against giving files up in place: all of it is found before anything is touched."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from moepack.errors import MachineError, MoepackError, RequestError
from moepack.packing.codec import Codec
from moepack.reading.pack import Pack
from moepack.sizes import exact_size_text, size_text
from moepack.storage import holes, sharing


def refusals(paths: Sequence[Path], target: Path, instead: str) -> Iterator[MoepackError]:
    """Yield what speaks against turning the files `paths` into others in the directory `target`.

    `instead` is what can be done without, for hints.
    """
    folder = existing(target)
    for path in paths:
        yield from _of_file(path, folder, instead)
    yield from _of_folders({folder, *(path.absolute().parent for path in paths)}, instead)


def existing(path: Path) -> Path:
    """Return the directory that `path` is, or that it will be made in."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def check_space(target: Path, length: int) -> MoepackError | None:
    """Return the error where fewer than `length` bytes are free; None where there is room."""
    status = os.statvfs(existing(target))
    free = status.f_bavail * status.f_frsize
    if free >= length:
        return None
    text = size_text if size_text(length) != size_text(free) else exact_size_text
    return MachineError(
        "not enough space, even for what is in both places for a moment",
        path=target,
        expected=text(length),
        found=f"{text(free)} free",
        hint="free some space",
    )


def check_open(path: Path) -> MoepackError | None:
    """Return the error where another program has the file open; None where none has."""
    if not sharing.is_open_elsewhere(path):
        return None
    names = ", ".join(list(sharing.holders(path))[:5])
    return RequestError(
        "another program has it open, or mapped",
        path=path,
        found=names or None,
        hint="end that program, and try again",
    )


def of_codec(codec: Codec) -> MoepackError:
    """Return the error for packing in place with a codec."""
    return RequestError(
        "a codec does not go with `in_place`: how long parts become is known too late",
        found=str(codec),
        hint="leave out the codec; or pack without `in_place`, where there is room for both",
    )


def check_plain(pack: Pack) -> None:
    """Raise RequestError where a pack has parts that are stored by a codec."""
    if pack.index.codecs:
        raise RequestError(
            "parts are stored by a codec: in place there is no room for them to become longer",
            path=pack.path,
            found=", ".join(pack.index.codecs),
            hint="restore it without `in_place`",
        )


def _of_file(path: Path, folder: Path, instead: str) -> Iterator[MoepackError]:
    if path.is_symlink():
        hint = (
            f"a cache that others use owns the file: {instead}; or take it out of the cache "
            "(move the file that the link names here) and let the cache go"
        )
        found = os.path.realpath(path)
        yield RequestError("a link to a file elsewhere", path=path, found=found, hint=hint)
        return
    status = os.stat(path)
    if status.st_nlink > 1:
        hint = f"they are the same bytes: remove the others; or {instead}"
        found = f"{status.st_nlink} names"
        yield RequestError(
            "the file has other names (hard links)", path=path, found=found, hint=hint
        )
    if status.st_dev != os.stat(folder).st_dev:
        hint = f"choose a place beside it, such as {path.absolute().parent}"
        problem = "not on the file system of the target: nothing would be saved"
        yield RequestError(problem, path=path, hint=hint)
    yield from _of_permission(path, status)
    try:
        yield from _of_blocks(path, instead)
    except OSError as error:
        yield MachineError(f"cannot open: {error.strerror}", path=path)


def _of_permission(path: Path, status: os.stat_result) -> Iterator[MoepackError]:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        yield RequestError("on a file system that is read-only", path=path)
        return
    problem = None if status.st_mode & stat.S_IWUSR else "it is marked read-only"
    if problem is None:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                problem = error.strerror
    if problem:
        hint = "make it writable (chmod u+w, chattr -i), if it may go"
        yield RequestError(f"cannot be written to: {problem}", path=path, hint=hint)


def _of_blocks(path: Path, instead: str) -> Iterator[MoepackError]:
    refusal = check_open(path)
    if refusal:
        yield refusal
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        hole = holes.hole_in(descriptor, 0, os.fstat(descriptor).st_size)
        if hole is not None:
            hint = "make a full copy (`cp --sparse=never`), or download it again"
            place = f"byte {hole:,}"
            yield RequestError("the file has holes already", path=path, place=place, hint=hint)
        elif sharing.shares_blocks(descriptor):
            yield RequestError(
                "a snapshot or a clone shares its blocks: nothing would be saved",
                path=path,
                hint=f"remove the snapshots and clones; or {instead}",
            )
    finally:
        os.close(descriptor)


def _of_folders(folders: set[Path], instead: str) -> Iterator[MoepackError]:
    for folder in sorted(folders):
        if not os.access(folder, os.W_OK | os.X_OK):
            yield RequestError("this folder cannot be written to", path=folder)
            continue
        try:
            can_punch = holes.can_punch(folder)
        except OSError as error:
            yield MachineError(f"cannot try a file with a hole: {error.strerror}", path=folder)
            continue
        if not can_punch:
            problem = "this file system cannot free a part of a file"
            yield RequestError(problem, path=folder, hint=f"use ext4, xfs or btrfs; or {instead}")
        snapshots = _zfs_snapshots(folder)
        if snapshots:
            problem = "a snapshot keeps all blocks: nothing would be saved"
            yield RequestError(problem, path=folder, found=snapshots, hint="remove the snapshots")


def _zfs_snapshots(folder: Path) -> str:
    """Name the snapshots of a ZFS file system: they stand in a hidden folder of its root."""
    device = os.stat(folder).st_dev
    root = folder
    while root.parent != root and os.stat(root.parent).st_dev == device:
        root = root.parent
    try:
        return ", ".join(sorted(os.listdir(root / ".zfs" / "snapshot"))[:3])
    except OSError:
        return ""
