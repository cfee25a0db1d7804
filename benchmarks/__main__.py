"""`python -m benchmarks`: measure against peers and limits, each pair in one run.

Ends with status 1 where a limit is not met.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import everything, program
from benchmarks.everything import PARTS, Options
from benchmarks.table import Row


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = program.new_parser("benchmarks", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="not all")
    parser.add_argument("--layers", type=int, default=6, help="of the model, 0.37 GB each")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each side")
    parser.add_argument("--trace", type=Path, help="of the routing that a model repeats")
    return parser


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the parts, with files on the disk to measure."""
    much = Options(options.layers, options.rounds, options.trace)
    with tempfile.TemporaryDirectory(prefix="moepack-bench-", dir=options.folder) as folder:
        yield from everything.rows(Path(folder), options.parts, much)


if __name__ == "__main__":
    sys.exit(program.measure(parser(), rows))
