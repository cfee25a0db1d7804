"""Install wheels and source archives alone in empty environments, and use them there.

    python releasing/trying.py dist/* --python python3.11 --python python3.13

It needs nothing but Python, so that it runs where moepack is not installed. Requirements come from
where pip finds them. A wheel for another machine is named, and left out.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CHECK = """
import ctypes, platform, sys
from pathlib import Path
import moepack
from moepack.running.programs import compiling

folder, machine = Path(moepack.__file__).parent, platform.machine()
assert folder.is_relative_to(sys.prefix), f"{folder} was imported"
assert Path(sys.prefix, "share", "man", "man1", "moepack.1").exists(), "no manual pages"
assert (folder / "include" / "moepack.h").exists(), "no moepack.h"
assert list((folder / "layouts").glob("*.toml")), "no layouts"
if sys.argv[1] == "libraries":
    for name in compiling.SOURCES:
        native = folder / "native"
        library = compiling.find_compiled(native, name, native, machine)
        assert library, f"no undamaged library {name} for {machine}"
        ctypes.CDLL(str(library))
print(moepack.__version__)
"""


def is_for_this_machine(file: Path) -> bool:
    """Return whether an archive or a wheel can be installed here."""
    tag = file.stem.rpartition("-")[2]
    is_of_linux = tag.startswith(("manylinux", "linux"))
    is_for_all = file.suffix != ".whl" or tag == "any"
    return is_for_all or (
        is_of_linux and platform.system() == "Linux" and tag.endswith(f"_{platform.machine()}")
    )


def try_file(file: Path, python: str, folder: Path) -> None:
    """Install a file in a new environment in `folder`, and run the session of `make demo` there.

    Raises CalledProcessError.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    binaries = folder / "environment" / "bin"
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    brings_libraries = file.suffix == ".whl" and "linux" in file.name
    commands = [
        [python, "-m", "venv", str(folder / "environment")],
        [f"{binaries}/python", "-m", "pip", "install", "--quiet", str(file.resolve())],
        [f"{binaries}/python", "-m", "pip", "check"],
        [f"{binaries}/python", "-I", "-c", _CHECK, "libraries" if brings_libraries else "none"],
        [f"{binaries}/moepack", "--version"],
        ["sh", str(ROOT / "tests" / "demo.sh")],
    ]
    for command in commands:
        subprocess.run(
            command,
            cwd=folder,
            env={**environment, "BIN": str(binaries)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )


def main() -> int:
    """Try each file with each Python; return 1 if one failed, or none could be tried."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--python", action="append", help="Interpreter.  [default: this one]")
    arguments = parser.parse_args()
    results = []
    for file in arguments.files:
        if not is_for_this_machine(file):
            print(f"{file.name}: for another machine: not tried here", flush=True)
            continue
        for python in arguments.python or [sys.executable]:
            with tempfile.TemporaryDirectory(prefix="moepack-") as folder:
                results.append(_try(file, python, Path(folder)))
    return 0 if results and all(results) else 1


def _try(file: Path, python: str, folder: Path) -> bool:
    """Print whether a file works with an interpreter; return it."""
    try:
        try_file(file, python, folder)
    except subprocess.CalledProcessError as error:
        print(f"{file.name}, {python}: {error.cmd}: {error.output}", flush=True)
        return False
    print(f"{file.name}, {python}: installed alone, and used", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
