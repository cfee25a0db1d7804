"""Run a command in the foreground as `moepack run` does: `python -m tests.support.foreground`."""

import os
import sys
import time
from pathlib import Path

from moepack.programs.command import extend_environment
from moepack.programs.process import Process, end_like
from moepack.programs.signals import SignalRelay

MODULE = (sys.executable, "-m", "tests.support.foreground")


def main(library: str, *arguments: str) -> int:
    """Run `arguments`, a library preloaded unless its path is empty; `sleep` before, if so told."""
    with SignalRelay() as relay:
        import numpy as np  # starts threads, which leave signals to the relay

        assert np.ones((64, 64)) @ np.ones((64, 64)) is not None
        if arguments[0] == "prepare":
            os.write(1, b"preparing\n")
            time.sleep(60)
        environment = extend_environment(os.environ, {"LD_PRELOAD": library} if library else {})
        executable = Path(arguments[0])
        with Process(executable, arguments, environment, relay.inherited_mask) as process:
            os.write(2, f"pid {process.pid}\n".encode())
            relay.attach(process)
            returncode = process.wait()
    assert returncode is not None
    return end_like(returncode)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
