"""Reasons why files cannot be given up in place; all are found before anything is touched."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from moepack.common.errors import MachineError, MoepackError, RequestError
from moepack.storage import blocks
from moepack.storage.regular_file import open_regular


def refusals(paths: Sequence[Path], target: Path, instead: str) -> Iterator[MoepackError]:
    """Yield the reasons against turning the files `paths` into others in the directory `target`.

    `instead` is an alternative, for hints.
    """
    folder = next(p for p in (target.absolute(), *target.absolute().parents) if p.exists())
    for path in paths:
        yield from _check_file(path, folder, instead)
    for parent in sorted({folder, *(path.absolute().parent for path in paths)}):
        yield from _check_folder(parent, instead)


def check_open(path: Path) -> MoepackError | None:
    """Return the error if another program has the file open; None if none has."""
    if not blocks.is_open_elsewhere(path):
        return None
    return RequestError(
        "another program has it open, or mapped",
        path=path,
        found=", ".join(list(blocks.holders(path))[:5]) or None,
        hint="end that program, and try again",
    )


def _check_file(path: Path, folder: Path, instead: str) -> Iterator[MoepackError]:
    if path.is_symlink():
        hint = (
            f"a cache that others use owns the file: {instead}; or take it out of the cache "
            "(move the file that the link names here) and let the cache go"
        )
        target = os.path.realpath(path)
        yield RequestError("a link to a file elsewhere", path=path, found=target, hint=hint)
        return
    status = os.stat(path)
    if status.st_nlink > 1:
        problem = "the file has other names (hard links)"
        hint = f"they are the same bytes: remove the others; or {instead}"
        yield RequestError(problem, path=path, found=f"{status.st_nlink} names", hint=hint)
    if status.st_dev != os.stat(folder).st_dev:
        hint = f"choose a place beside it, such as {path.absolute().parent}"
        problem = "not on the file system of the target: nothing would be saved"
        yield RequestError(problem, path=path, hint=hint)
    yield from _check_permission(path, status)
    try:
        yield from _check_blocks(path, instead)
    except OSError as error:
        yield MachineError(f"cannot open: {error.strerror}", path=path)


def _check_permission(path: Path, status: os.stat_result) -> Iterator[MoepackError]:
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


def _check_blocks(path: Path, instead: str) -> Iterator[MoepackError]:
    if refusal := check_open(path):
        yield refusal
    with open(path, "rb", opener=open_regular) as file:
        hole = blocks.hole_in(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        if hole is not None:
            hint = "make a full copy (`cp --sparse=never`), or download it again"
            place = f"byte {hole:,}"
            yield RequestError("the file has holes already", path=path, place=place, hint=hint)
        elif blocks.shares_blocks(file.fileno()):
            problem = "a snapshot or a clone shares its blocks: nothing would be saved"
            hint = f"remove the snapshots and clones; or {instead}"
            yield RequestError(problem, path=path, hint=hint)


def _check_folder(folder: Path, instead: str) -> Iterator[MoepackError]:
    if not os.access(folder, os.W_OK | os.X_OK):
        yield RequestError("this folder cannot be written to", path=folder)
        return
    try:
        can_punch = blocks.can_punch(folder)
    except OSError as error:
        yield MachineError(f"cannot try a file with a hole: {error.strerror}", path=folder)
        return
    if not can_punch:
        problem = "this file system cannot free a part of a file"
        yield RequestError(problem, path=folder, hint=f"use ext4, xfs or btrfs; or {instead}")
