"""moepack.h, compiled as its users do: with every warning an error."""

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.built import built
from tests.support.children import run_command

HEADER = Path(__file__).parents[2] / "include" / "moepack.h"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
POSIX = ("-D_POSIX_C_SOURCE=200809L", "-D_FILE_OFFSET_BITS=64", f"-I{HEADER.parent}")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def compiled(compiler: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a compiler with all warnings as errors, libraries last.

    The test is skipped where the compiler makes no programs of such a kind.

    Files among the arguments are paths, and the others texts.
    """
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    run = _run(compiler, *arguments)
    flags = tuple(one for one in arguments if isinstance(one, str) and one != "-o")
    if run.returncode and (complaint := _complaint(compiler, flags)):
        pytest.skip(f"{compiler} {' '.join(flags)} makes no programs here: {complaint}")
    return run


def compiled_once(name: str, compiler: str, *arguments: str | Path) -> Path:
    """Return a file that `compiled` makes without an error, once for the same files and flags."""

    def make(target: Path) -> None:
        run = compiled(compiler, *arguments, "-o", target)
        assert run.returncode == 0, run.stderr

    return built(name, make, compiler, *arguments)


def _run(compiler: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    libraries = [str(one) for one in arguments if str(one).startswith("-l")]
    others = [str(one) for one in arguments if str(one) not in libraries]
    return run_command(compiler, *WARNINGS, *POSIX, *others, *libraries)


@cache
def _complaint(compiler: str, flags: tuple[str, ...]) -> str:
    """Return what a compiler says of the least program; nothing where it makes it."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "least.c"
        source.write_text("int main(void) { return 0; }\n")
        run = _run(compiler, *flags, source, "-o", Path(folder) / "least")
    return run.stderr.partition("\n")[0] if run.returncode else ""
