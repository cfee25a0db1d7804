"""Who else has a file: other programs that open it at any moment."""

import os
import subprocess
import sys
from pathlib import Path

from moepack.storage.sharing import is_open_elsewhere

OPENED_MEANWHILE = """
import fcntl, os, sys
from moepack.storage.sharing import is_open_elsewhere

path, call, opened = sys.argv[1], fcntl.fcntl, []

def fcntl_and_open(descriptor, command, argument=0):
    result = call(descriptor, command, argument)
    if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except BlockingIOError:
            opened.append(path)
    return result

fcntl.fcntl = fcntl_and_open
is_open_elsewhere(path)
print(len(opened))
"""


def test_an_open_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert not is_open_elsewhere(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert is_open_elsewhere(path)
    finally:
        os.close(descriptor)


def test_who_opens_the_file_while_it_is_looked_at_ends_nothing(tmp_path: Path) -> None:
    """The system sends the holder of a lease a signal then, which by default ends the process."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    run = subprocess.run(
        [sys.executable, "-c", OPENED_MEANWHILE, path], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "1\n")
