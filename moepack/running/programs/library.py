"""Find a library of `native/`: with the package, in the user's cache, or compiled now."""

import atexit
import platform
import shutil
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from moepack.common import extras
from moepack.common.errors import MachineError
from moepack.running.programs.compiling import CompileError, compile_library, find_compiled
from moepack.storage.folders import is_ours, user_folder

_SEPARATORS = " :$\t\n"
"""Characters that the dynamic linker does not read as part of a path in LD_PRELOAD."""


def native_folder() -> Path:
    """Return the folder of the C files: in the package, or beside it in a checkout."""
    package = Path(str(resources.files("moepack")))
    return package / "native" if (package / "native").exists() else package.parent / "native"


def find_library(
    name: str, *, native: Path | None = None, compilers: Sequence[Sequence[str]] | None = None
) -> Path:
    """Return the path of a library of `compiling.SOURCES`, from the C files in `native`.

    It is beside its sources in a wheel, else in the user's cache, into which the first use compiles
    it; without a cache, in a temporary folder until this process ends. Raises MachineError if it
    cannot be compiled, and if the system is not Linux.
    """
    if (system := platform.system()) != "Linux":
        raise MachineError(f"experts can be loaded into programs only on Linux, not on {system}")
    machine = platform.machine()
    native = native_folder() if native is None else native
    packaged = find_compiled(native, name, native, machine)
    if packaged is not None and _can_be_preloaded(packaged):
        return packaged
    # A folder that others may write to is not used: what lies there would run in the user's name.
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    if cache is not None and not _can_be_preloaded(cache):
        cache = None
    if cache and (cached := find_compiled(native, name, cache, machine)) and is_ours(cached):
        return cached
    reason: Exception | None = None
    for kept in [cache, None] if cache else [None]:
        folder = kept or Path(tempfile.mkdtemp(prefix="moepack-"))
        if kept is None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            if not _can_be_preloaded(folder):
                problem = "LD_PRELOAD takes no path with spaces, colons or dollar signs"
                raise MachineError(problem, path=folder, hint="set TMPDIR to another folder")
        try:
            if packaged is not None:  # where no path can be preloaded from
                return Path(shutil.copy(packaged, folder))
            return compile_library(native, name, folder, compilers=compilers)
        except (OSError, CompileError) as error:  # read-only, or nothing may be executed there
            reason = error
    hint = f"install a C compiler: apt install gcc, or {extras.package_hint('ziglang')}"
    raise MachineError(f"the library cannot be compiled: {reason}", hint=hint)


def _can_be_preloaded(path: Path) -> bool:
    return not set(_SEPARATORS) & set(str(path))
