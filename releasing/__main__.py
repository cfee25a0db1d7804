"""Check that a release can be made: `make release-check`. With `--notes`, print what is new."""

import sys

from releasing.checks import CHECKS, ROOT, notes


def main() -> int:
    """Print each check with its faults; return 1 if there are any."""
    if sys.argv[1:] == ["--notes"]:
        print(notes(ROOT))
        return 0
    count = 0
    for title, check in CHECKS.items():
        faults = list(check(ROOT))
        print(f"{'FAULT' if faults else 'ok':5}  {title}")
        for fault in faults:
            print(f"       {fault}")
        count += len(faults)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
