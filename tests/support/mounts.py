"""Packs mounted by the command, in a process of its own, as long as a test needs them."""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.children import MOEPACK, PATIENCE, Piped


def why_not() -> str | None:
    """Return why nothing can be mounted here; None if it can."""
    try:
        importlib.import_module("mfusepy")
    except ImportError:
        return "mfusepy is not installed"
    except OSError:
        return "there is no libfuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse for us"
    if not shutil.which("fusermount3"):
        return "there is no fusermount3"
    return None


needs_fuse = pytest.mark.skipif(why_not() is not None, reason=f"no FUSE: {why_not()}")


def start(pack: Path, folder: Path, ignored: Iterable[int] = ()) -> Piped:
    """Begin to mount a pack, in a process that ignores some of the signals which end a mount.

    Whether the tests themselves ignore them, as under nohup, makes no difference.
    """

    def set_signals() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return Piped(*MOEPACK, "mount", pack, folder, preexec_fn=set_signals)


@contextlib.contextmanager
def mounted(pack: Path, folder: Path, ignored: Iterable[int] = ()) -> Iterator[Piped]:
    """Mount a pack until the block ends, then unmount it and see that it ended well."""
    folder.mkdir(exist_ok=True)
    with start(pack, folder, ignored) as process:
        try:
            first = process.stdout.readline()
            assert first, process.communicate()[1]
            yield process
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=PATIENCE)
        finally:
            process.kill()
            unmount(folder)
    assert process.returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["fusermount3", "-u", "-z", "-q", str(folder)], check=False)
