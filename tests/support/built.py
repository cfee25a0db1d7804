"""Programs and libraries in C, compiled once for the same files and flags, by all workers together.

They lie in `build/tests/`, under a digest of all that they are made of.
"""

import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "tests"
_SECONDS_KEPT = 7 * 24 * 3600


def built(name: str, make: Callable[[Path], object], *command: str | Path) -> Path:
    """Return the file `name` that `make` writes to the path that it is given.

    `command` is what it runs but for that path: the compiler, flags, and the files, which may
    include the headers of moepack. The file is for reading and running alone.
    """
    digest = hashlib.sha256(_headers())
    for word in command:
        found = Path(word) if Path(word).is_file() else shutil.which(word)
        state = Path(found).read_bytes() if isinstance(found, Path) else _state(found)
        digest.update(b"\0%b\0%b" % (str(word).encode(), state))
    folder = _FOLDER / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _remove_old()
            make(folder / "unfinished")
            (folder / "unfinished").rename(folder / name)
    return folder / name


def _state(program: str | None) -> bytes:
    """Return what changes with a compiler: an update is a new file."""
    return b"" if program is None else str(Path(program).resolve().stat()[:9]).encode()


@cache
def _headers() -> bytes:
    paths = sorted([*(_ROOT / "native").glob("*.h"), *(_ROOT / "include").glob("*.h")])
    return b"\0".join(path.read_bytes() for path in paths)


def _remove_old() -> None:
    for folder in _FOLDER.iterdir():
        if folder.stat().st_mtime < time.time() - _SECONDS_KEPT:
            shutil.rmtree(folder, ignore_errors=True)
