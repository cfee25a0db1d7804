"""Commands on terminals: real ones, of the system."""

import os
import pty
import subprocess
import sys

MOEPACK = (sys.executable, "-m", "moepack")


def on_terminal(*command: str, columns: int = 80, **environment: str) -> str:
    """Run a command on a terminal of its own; return all that it wrote there."""
    ours, theirs = pty.openpty()
    names = os.environ | {"TERM": "xterm", "COLUMNS": str(columns)} | environment
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=names) as run:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 1 << 16):
                written += piece
        except OSError:  # how Linux says that the other end was closed
            pass
        run.wait(60)
    os.close(ours)
    return written.decode()
