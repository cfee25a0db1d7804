"""`python -m benchmarks.slow_drive SIZE FOLDER -- COMMAND`: a command on a slower drive.

The command, and all that it starts, read together at most SIZE bytes a second from the drive that
FOLDER lies on, whether past the page cache, through it, or from mapped files. It takes the right to
make control groups, such as root's. `moepack bench --run --read-limit SIZE` does the same for the
programs that it compares.
"""

import subprocess
import sys
from pathlib import Path

from moepack.bench.control_group import control_group
from moepack.common.errors import MoepackError
from moepack.common.sizes import parse_size


def main() -> int:
    """Run the command; return its exit code."""
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        sys.exit(__doc__)
    try:
        with control_group(reads={Path(sys.argv[2]): parse_size(sys.argv[1])}) as group:
            assert group is not None
            return subprocess.run(group.command(sys.argv[4:]), check=False).returncode
    except (MoepackError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
