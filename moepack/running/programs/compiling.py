"""Compile the libraries of `native/`. The build hook uses this file alone: it imports Python's own.

A compiled library's name is `NAME-DIGEST-MACHINE-DIGEST.so`: first the digest of its sources, so
that another version is another file, and last its own, so that a damaged file is none.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}
"""The machines that the library is written for, and their numbers in ELF headers."""
GLIBC = (2, 28)
"""The oldest glibc that a library for another machine, or for a published wheel, runs with."""
_FLAGS = [
    "-shared",
    "-fPIC",
    "-std=c17",
    "-fvisibility=hidden",
    "-O2",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    "-Wl,-z,relro",
    "-Wl,-z,now",
    "-Wl,-z,noexecstack",
]
_LIBRARIES = ("-ldl", "-lm", "-lpthread")
_SECONDS = 120.0  # zig compiles parts of the C library first


_CORE = ("cache", "drive", "guesses", "order", "pool", "prompts", "reads", "residents", "slots")
SOURCES = {
    "seam": (
        *_CORE,
        "digest",
        "faults",
        "ggml",
        "mapping",
        "program",
        "regions",
        "routers",
        "server",
    ),
    "cache": (*_CORE, "library"),
}
"""The C files of each library, by name: one for programs to preload, one for engines to link."""


class CompileError(Exception):
    """No compiler is installed, or none made a library that can be loaded."""


def installed_compilers() -> list[tuple[str, ...]]:
    """Return the commands of the C compilers that are installed, the system's own first."""
    compilers = [(name,) for name in ("cc", "clang", "gcc") if shutil.which(name)]
    return [*compilers, *_zig()]


def _zig() -> list[tuple[str, ...]]:
    is_installed = importlib.util.find_spec("ziglang") is not None
    return [(sys.executable, "-m", "ziglang", "cc")] if is_installed else []


def find_compiled(native: Path, name: str, folder: Path, machine: str) -> Path | None:
    """Return the undamaged library in `folder` that was compiled from the sources in `native`."""
    stem = _stem(native, name, machine)
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            if path.is_file() and path.name == f"{stem}-{_digest(path.read_bytes())}.so":
                return path
        except OSError:
            continue
    return None


def compile_in_place(native: Path) -> None:
    """Compile the libraries that are not beside their sources in `native`, in place of older ones.

    Raises what `compile_library` raises.
    """
    machine = platform.machine()
    for name in SOURCES:
        if find_compiled(native, name, native, machine) is None:
            for old in native.glob(f"{name}-*-{machine}-*.so"):
                old.unlink()
            compile_library(native, name, native)


def cross_compile_library(native: Path, name: str, folder: Path, machine: str) -> Path:
    """Compile a library with zig for `machine` and `GLIBC`."""
    flags = f"-target {machine}-linux-gnu.{'.'.join(map(str, GLIBC))}".split()
    return compile_library(native, name, folder, machine=machine, compilers=_zig(), flags=flags)


def compile_library(
    native: Path,
    name: str,
    folder: Path,
    *,
    machine: str | None = None,
    compilers: Sequence[Sequence[str]] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Compile a library of SOURCES for a machine, by default this one; return its path in `folder`.

    `native` is the folder of its C files.

    Raises CompileError, and OSError if `folder` cannot be written to.
    """
    machine = platform.machine() if machine is None else machine
    compilers = installed_compilers() if compilers is None else compilers
    if machine not in MACHINES:
        raise CompileError(f"the library is not written for {machine}")
    if not compilers:
        raise CompileError("no C compiler is installed")
    problems = []
    sources = [str(native / f"{one}.c") for one in SOURCES[name]]
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as scratch:
        for number, compiler in enumerate(compilers):
            library = Path(scratch) / f"{number}.so"
            options = (*_FLAGS, *flags, "-o", str(library), *sources, *_LIBRARIES)
            problem = _run([*compiler, *options], scratch) or _why_not_loadable(library, machine)
            if problem is None:
                stem = _stem(native, name, machine)
                compiled = folder / f"{stem}-{_digest(library.read_bytes())}.so"
                library.chmod(0o755)
                os.replace(library, compiled)
                return compiled
            problems.append(f"{Path(compiler[0]).name}: {problem}")
    raise CompileError("; ".join(problems))


def _run(command: Sequence[str | Path], scratch: str) -> str | None:
    """Run a command; return its first error message."""
    # Compilers get no preloaded library, and zig's caches are not in homes, which may be read-only.
    ours = {"LC_ALL": "C", "ZIG_GLOBAL_CACHE_DIR": scratch, "ZIG_LOCAL_CACHE_DIR": scratch}
    names = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=names | ours,
        ) as process:
            try:
                output = process.communicate(timeout=_SECONDS)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                process.kill()
                return f"not done after {_SECONDS:.0f} s"
    except OSError as error:
        return str(error.strerror)
    if process.returncode == 0:
        return None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    complaints = [line for line in lines if "rror" in line] or lines
    return complaints[0] if complaints else f"exit code {process.returncode}"


def _why_not_loadable(library: Path, machine: str) -> str | None:
    """Load a library in another process; return why that fails."""
    header = library.read_bytes()[:20] if library.exists() else b""
    if header[:4] != b"\x7fELF" or int.from_bytes(header[18:20], "little") != MACHINES[machine]:
        return f"made no library for {machine}"
    if machine != platform.machine():
        return None
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    return _run([sys.executable, "-I", "-S", "-c", code, library], str(library.parent))


def _stem(native: Path, name: str, machine: str) -> str:
    headers = [*native.glob("*.h"), *(native.parent / "include").glob("*.h")]
    files = [*(native / f"{one}.c" for one in SOURCES[name]), *sorted(headers)]
    content = b"".join(one.name.encode() + b"\0" + one.read_bytes() for one in files)
    return f"{name}-{_digest(content)}-{machine}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
