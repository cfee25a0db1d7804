"""Run a command in the foreground as `moepack run` does: `python -m tests.support.foreground`."""

import os
import sys
import time
from pathlib import Path

from moepack.running.programs.process import Process, SignalRelay, end_like

MODULE = (sys.executable, "-m", "tests.support.foreground")


def main(*arguments: str) -> int:
    """Run `arguments`; sleep before with `prepare`."""
    with SignalRelay() as relay:
        import numpy as np  # starts threads, which leave signals to the relay

        assert np.ones((64, 64)) @ np.ones((64, 64)) is not None
        if arguments[0] == "prepare":
            os.write(1, b"preparing\n")
            time.sleep(60)
        executable = Path(arguments[0])
        with Process(executable, arguments, os.environ, relay.inherited_mask) as process:
            os.write(2, f"pid {process.pid}\n".encode())
            relay.attach(process)
            returncode = process.wait()
    assert returncode is not None
    return end_like(returncode)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
