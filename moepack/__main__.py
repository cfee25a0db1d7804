"""The program: `python -m moepack`, and the command `moepack`.

It imports nothing before an interruption would be understood: the rest is loaded under a handler
that ends the process, for there is nothing to clean up yet.
"""

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line, and exit with its code."""
    try:
        import os
        import signal

        def stop(_signal: int, _frame: object) -> None:
            # An exception could be lost in a callback of the import system.
            os.write(2, b"error: interrupted\n")
            os._exit(INTERRUPTED)

        # A shell's background process ignores the signal, and goes on doing so.
        is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_heeded:
            signal.signal(signal.SIGINT, stop)
        from moepack.cli.main import main as run

        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
