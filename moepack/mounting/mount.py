"""Mount a pack: the original shards as read-only files, until somebody ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moepack import extras
from moepack.errors import MachineError, MoepackError, PackError, RequestError
from moepack.format import manifest
from moepack.mounting.file_system import FileSystem
from moepack.mounting.mount_point import check_mount_point, unmount_command
from moepack.mounting.shard_view import ShardView
from moepack.reading.pack import Pack
from moepack.reading.shard_map import map_shards
from moepack.storage.inputs import InputFile, Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moepack.reading.shard_map import ShardMap

_DEVICE = "/dev/fuse"
_HANGUPS = (signal.SIGINT, signal.SIGHUP)


class MountedFile(NamedTuple):
    """A shard that is shown as a file, `length` bytes long."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class MountFacts:
    """What is mounted where: the shards, `length` bytes in all, and the command that ends it."""

    path: str
    files: tuple[MountedFile, ...]
    length: int
    unmount: str


def mount(
    pack: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    started: Callable[[MountFacts], None] | None = None,
    failed: Callable[[MoepackError], None] | None = None,
) -> None:
    """Show the shards that a whole pack was made from as files in the empty folder `target`.

    Nothing is stored, and no digest is compared. Returns when it was unmounted: by the command, or
    by SIGINT, SIGTERM or SIGHUP, which libfuse handles meanwhile; so call it in the main thread of
    a process that does nothing else. SIGINT and SIGHUP are ignored where they were before.

    `started` is called once it is mounted, and must not look at the files, which wait for it; what
    it raises ends the mount. `failed` is called with what could not be read, once for each part or
    tensor: its reader gets EIO. Both are called from other threads.

    Raises RequestError for a folder that will not do and for a pack with parts that are stored by a
    codec, PackError where the pack is not whole, and MachineError where there is no FUSE.
    """
    serve = _fuse_server()
    folder = Path(os.path.abspath(target))
    check_mount_point(folder)
    with Pack(pack) as opened:
        shards = map_shards(opened)
        _check_plain(opened)
        files = [InputFile(os.fspath(path)) for path in opened.file_paths]
        with Inputs(files, PackError) as inputs:
            _check_lengths(opened, inputs)
            facts = _facts(os.fspath(target), folder, shards)
            start = _Start(facts, started or _nothing)
            system = FileSystem(
                [ShardView(shard, inputs) for shard in shards],
                time_ns=os.stat(opened.path / manifest.NAME).st_mtime_ns,
                started=start,
                failed=failed or _nothing,
            )
            _serve(serve, system, folder)
        if start.error is not None:
            raise start.error


class _Start:
    """Tells the caller that it is mounted; what he raises ends the mount.

    libfuse could not pass it on: it would wait for the next request instead.
    """

    def __init__(self, facts: MountFacts, started: Callable[[MountFacts], None]) -> None:
        self._facts = facts
        self._started = started
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._started(self._facts)
        except BaseException as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)


def _nothing(*_: object) -> None:
    """Tell nobody."""


def _facts(target: str, folder: Path, shards: tuple[ShardMap, ...]) -> MountFacts:
    files = tuple(MountedFile(shard.name, shard.length) for shard in shards)
    length = sum(shard.length for shard in shards)
    return MountFacts(target, files, length, unmount_command(folder))


def _fuse_server() -> Callable[[FileSystem, str], object]:
    """Return what mounts and serves; raise MachineError where the machine lacks it."""
    try:
        from moepack.mounting.fuse_server import FuseServer
    except ModuleNotFoundError:
        problem, hint = "mounting needs mfusepy", extras.hint("mount")
        raise MachineError(problem, hint=hint) from None
    except (OSError, AttributeError):  # so mfusepy says that there is none, or one of another kind
        problem, hint = "mounting needs libfuse", "apt-get install fuse3"
        raise MachineError(problem, hint=hint) from None
    if sys.platform == "linux" and not os.access(_DEVICE, os.R_OK | os.W_OK):
        hint = "modprobe fuse; for a container: --device /dev/fuse --cap-add SYS_ADMIN"
        raise MachineError("this machine lets nobody mount with FUSE", path=_DEVICE, hint=hint)
    return FuseServer


def _check_plain(pack: Pack) -> None:
    """Raise RequestError where parts are stored by a codec.

    The kernel asks for ranges that are much shorter than a part, which had to be decoded whole for
    each of them.
    """
    if pack.index.codecs:
        raise RequestError(
            "parts are stored by a codec: a mount cannot show them",
            path=pack.path,
            found=", ".join(pack.index.codecs),
            hint="run the pack itself; or make files with `moepack restore` or `export gguf`",
        )


def _check_lengths(pack: Pack, inputs: Inputs) -> None:
    for number, file in enumerate(pack.index.files):
        descriptor = inputs.descriptor(number)
        assert descriptor is not None
        found = os.fstat(descriptor).st_size
        if found < file.length:
            raise PackError(
                "the file is cut short",
                path=pack.file_paths[number],
                expected=f"{file.length:,} bytes",
                found=f"{found:,}",
            )


def _serve(serve: Callable[[FileSystem, str], object], system: FileSystem, folder: Path) -> None:
    try:
        with _signals_left_to_libfuse():
            serve(system, os.fspath(folder))
    except RuntimeError as error:
        if system.has_started:  # a signal ended it
            return
        raise MachineError(
            "cannot mount",
            path=folder,
            found=f"libfuse's code {error}",
            hint="is fuse3 installed (apt-get install fuse3), and may you write to the folder?",
        ) from None


@contextlib.contextmanager
def _signals_left_to_libfuse() -> Iterator[None]:
    """Give SIGTERM back to the system meanwhile: libfuse handles what nobody else does.

    A handler of Python's would wait for the end of libfuse, which would wait for the handler.
    What is ignored, as by nohup or behind a shell's `&`, stays so: mfusepy would undo that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = [one for one in _HANGUPS if signal.getsignal(one) == signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    before: Any = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
