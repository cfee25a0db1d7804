"""Mount a pack: the original shards as read-only files, until somebody ends it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.common import extras
from moepack.common.errors import MachineError, MoepackError, PackError, RequestError
from moepack.common.escaping import shell_word
from moepack.common.sizes import count_text
from moepack.pack.format import manifest
from moepack.pack.format.manifest import FileEntry
from moepack.pack.mounting.file_system import FileSystem, ShardView
from moepack.pack.reading.pack import Pack
from moepack.pack.reading.shard_map import map_shards
from moepack.storage.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DEVICE = "/dev/fuse"
_HANGUPS = (signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class MountFacts:
    """A mounted pack: its shards, `length` bytes in all, and the command that unmounts it."""

    path: str
    files: tuple[FileEntry, ...]
    length: int
    unmount: str


def mount(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    started: Callable[[MountFacts], None] | None = None,
    failed: Callable[[MoepackError], None] | None = None,
) -> None:
    """Show the shards of a whole pack as files in the empty folder `target`.

    Nothing is stored, and no digest is checked. Returns after unmounting: by the command, or by
    SIGINT, SIGTERM or SIGHUP, which libfuse handles meanwhile; so call it in the main thread of a
    process that does nothing else. SIGINT and SIGHUP stay ignored if they were before.

    `started` is called once it is mounted, and must not access the files, which wait for it; an
    exception from it ends the mount. `failed` is called once with the error of each part or tensor
    that could not be read: its reader gets EIO. Both are called from other threads.

    Raises RequestError for a folder that is not empty, PackError if the pack is not whole, and
    MachineError if there is no FUSE.
    """
    folder = Path(os.path.abspath(target))
    _check_mount_point(folder)
    with Pack(pack) as opened:
        opened.require_files()
        opened.require_complete()
        shards = map_shards(opened)
        serve = _fuse_server()
        mounted = tuple(FileEntry(shard.name, shard.length) for shard in shards)
        length = sum(shard.length for shard in shards)
        facts = MountFacts(os.fspath(target), mounted, length, _unmount_command(folder))
        with Inputs(opened.file_paths, PackError) as inputs:
            _check_lengths(opened, inputs)
            exceptions: list[BaseException] = []

            def begin() -> None:
                # libfuse could not pass an exception on: it would wait for the next request.
                try:
                    if started is not None:
                        started(facts)
                except BaseException as error:
                    exceptions.append(error)
                    os.kill(os.getpid(), signal.SIGTERM)

            system = FileSystem(
                [ShardView(shard, inputs) for shard in shards],
                time_ns=os.stat(opened.path / manifest.NAME).st_mtime_ns,
                started=begin,
                failed=failed or (lambda error: None),
            )
            _serve(serve, system, folder)
        for exception in exceptions:
            raise exception


def _check_mount_point(folder: Path) -> None:
    try:
        is_mount_point = os.path.ismount(folder)
        names = os.listdir(folder)
    except FileNotFoundError:
        hint = f"mkdir {shell_word(os.fspath(folder))}"
        raise RequestError("no such folder to mount at", path=folder, hint=hint) from None
    except NotADirectoryError:
        hint = "name an empty folder: mkdir shards"
        raise RequestError("not a folder to mount at", path=folder, hint=hint) from None
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise MachineError(f"cannot read: {error.strerror}", path=folder) from None
        problem = "the mount here was killed and not unmounted"
        raise RequestError(problem, path=folder, hint=_unmount_command(folder)) from None
    if is_mount_point:
        problem = "something is mounted here already"
        raise RequestError(problem, path=folder, hint=_unmount_command(folder))
    if names:
        problem, expected = "the folder to mount at is not empty", "an empty folder"
        count = count_text(len(names), "name")
        raise RequestError(problem, path=folder, expected=expected, found=count)


def _unmount_command(folder: Path) -> str:
    program = "umount" if sys.platform == "darwin" else "fusermount3 -u"
    return f"{program} {shell_word(os.fspath(folder))}"


def _fuse_server() -> Callable[[FileSystem, str], object]:
    """Return the class that mounts and serves; raise MachineError if the machine lacks it."""
    try:
        from moepack.pack.mounting.fuse_server import FuseServer
    except ModuleNotFoundError:
        problem, hint = "mounting needs mfusepy", extras.hint("mount")
        raise MachineError(problem, hint=hint) from None
    except (OSError, AttributeError):  # so mfusepy says that there is none, or one of another kind
        problem, hint = "mounting needs libfuse", "apt-get install fuse3"
        raise MachineError(problem, hint=hint) from None
    if sys.platform == "linux" and not os.access(_DEVICE, os.R_OK | os.W_OK):
        hint = "modprobe fuse; for a container: --device /dev/fuse --cap-add SYS_ADMIN"
        raise MachineError("this machine does not allow FUSE mounts", path=_DEVICE, hint=hint)
    return FuseServer


def _check_lengths(pack: Pack, inputs: Inputs) -> None:
    for number, file in enumerate(pack.index.files):
        if (length := inputs.length(number)) < file.length:
            path, expected = pack.file_paths[number], f"{file.length:,} bytes"
            raise PackError(
                "the file is cut short", path=path, expected=expected, found=f"{length:,}"
            )


def _serve(serve: Callable[[FileSystem, str], object], system: FileSystem, folder: Path) -> None:
    try:
        with _signals_left_to_libfuse():
            serve(system, os.fspath(folder))
    except RuntimeError as error:
        if system.has_started:  # a signal ended it
            return
        code = f"libfuse's code {error}"
        hint = "is fuse3 installed (apt-get install fuse3), and may you write to the folder?"
        raise MachineError("cannot mount", path=folder, found=code, hint=hint) from None


@contextlib.contextmanager
def _signals_left_to_libfuse() -> Iterator[None]:
    """Give SIGTERM and SIGHUP back to the system meanwhile: libfuse handles what nobody else does.

    A handler of Python's would wait for the end of libfuse, which would wait for the handler.
    Signals that are ignored, as by nohup or behind a shell's `&`, stay so: mfusepy would undo that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = [one for one in _HANGUPS if signal.getsignal(one) == signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    left = {signal.SIGTERM, signal.SIGHUP}.difference(ignored)
    before: dict[int, Any] = {one: signal.signal(one, signal.SIG_DFL) for one in left}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
