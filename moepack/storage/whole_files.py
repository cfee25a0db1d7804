"""New files that appear under their names when they are whole, and whose bytes are known before.

Restoring and exporting know the digest of everything that they write. So they need no journal: what
an interrupted run left is read, what is right in it stays, and the rest is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.errors import MachineError, PackError, RequestError
from moepack.storage.atomic import publish, refuse_existing, require_folder_of
from moepack.storage.copying import Copier, WrittenFile
from moepack.storage.extents import NewFile
from moepack.storage.inputs import InputFile, Inputs
from moepack.storage.space import check_space

SUFFIX = ".partial"

Progress = Callable[[int, int], None]
"""Called with the bytes done since its last call, and the bytes that are to be done in all."""


class WholeFilesResult(NamedTuple):
    """What was done, in bytes: `cloned_length` is shared with inputs, `kept_length` from before."""

    length: int
    cloned_length: int
    kept_length: int


def write_whole_files(
    folder: Path,
    files: Sequence[NewFile],
    inputs: Sequence[Path],
    *,
    data: Sequence[bytes] = (),
    check: Callable[[Path, str], None] | None = None,
    resume: bool = False,
    force: bool = False,
    threads: int = 4,
    progress: Progress | None = None,
) -> WholeFilesResult:
    """Write `files` into `folder`, each under a name ending in `.partial` until it is whole.

    `inputs` are the files of a pack that their extents name, `data` those inputs behind them that
    are in memory. `check` is called with each file that
    is whole and synced, and its name, before it gets that; it raises where something is wrong.
    With `resume` what an interrupted run left is used, with `force` files of these names are
    replaced. Raises RequestError for an existing file, PackError for a pack whose bytes are not
    what its index says, MachineError for a machine that cannot.
    """
    _check_names(folder, files, inputs, resume, force)
    total = sum(file.length for file in files)
    check_space(folder, total - _held_length(folder, files))
    partials = [file._replace(name=file.name + SUFFIX) for file in files]

    def finish(written: WrittenFile) -> None:
        name = written.name.removesuffix(SUFFIX)
        if check is not None:
            check(folder / written.name, name)
        publish(folder / written.name, folder / name)

    def advanced(length: int) -> None:
        if progress is not None:
            progress(length, total)

    paths = [InputFile(str(path)) for path in inputs]
    with _resumable(folder), Inputs(paths, PackError, data) as opened:
        copier = Copier(folder, opened, advanced, resume=resume, clone=True)
        copier.write(partials, threads, finish)
    return WholeFilesResult(total, copier.cloned_length, copier.kept_length)


def _check_names(
    folder: Path, files: Sequence[NewFile], inputs: Sequence[Path], resume: bool, force: bool
) -> None:
    for file in files:
        path = folder / file.name
        require_folder_of(path)
        if path.is_dir():
            raise RequestError("a folder, not a file to write", path=path)
        if path.exists() and any(os.path.samefile(path, held) for held in inputs):
            raise RequestError("it is one of the files to read", path=path)
        refuse_existing(path, force=force)
        partial = folder / (file.name + SUFFIX)
        if partial.exists() and not resume:
            if not force:
                hint = "continue it with --resume, or begin again with --force"
                raise RequestError("an interrupted run left this file", path=partial, hint=hint)
            partial.unlink()


def _held_length(folder: Path, files: Sequence[NewFile]) -> int:
    """Return the bytes that an interrupted run has taken already."""
    held = 0
    for file in files:
        try:
            held += min(file.length, 512 * os.stat(folder / (file.name + SUFFIX)).st_blocks)
        except FileNotFoundError:
            continue
    return held


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Turn what the system says while writing into a MachineError, and say how to go on."""
    hint = "run the same command with --resume to continue"
    try:
        yield
    except OSError as error:
        no_space = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise MachineError(
            "no space left" if no_space else f"cannot write: {error.strerror}",
            path=error.filename or folder,
            hint="free some space, then run the same command with --resume" if no_space else hint,
        ) from error
    except KeyboardInterrupt as stop:
        stop.add_note(hint)
        raise
