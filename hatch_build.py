"""Compile the preloaded library while moepack is built, where the machine can.

A wheel brings it and is of one machine then; without a compiler the wheel is for all machines, and
the library is compiled at first use. MOEPACK_WHEEL_MACHINE names the machine of a wheel that is to
be published (x86_64, aarch64): it is compiled with zig for all systems since a certain glibc.
"""

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PreloadedLibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    """Put the preloaded library beside its source, in wheels and in checkouts."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it before the files of a wheel are gathered; `editable` stays in the checkout."""
        source = Path(self.root, "moepack", "running", "pager", "preload.c")
        if platform.system() != "Linux" or not source.exists():
            return
        compiling = _load(Path(self.root, "moepack", "running", "programs", "compiling.py"))
        published = os.environ.get("MOEPACK_WHEEL_MACHINE")
        try:
            if version == "editable":
                _compile_in_place(compiling, source)
            else:
                self._add_to_wheel(compiling, source, published, build_data)
        except (compiling.CompileError, OSError) as error:
            if published:
                raise
            self.app.display_warning(f"the preloaded library is compiled at first use: {error}")

    def _add_to_wheel(
        self, compiling: ModuleType, source: Path, published: str | None, build_data: dict[str, Any]
    ) -> None:
        # It is removed with the hook, when the wheel is written.
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        if published:
            library = compiling.cross_compile_library(source, folder, published)
            system = f"manylinux_{'_'.join(map(str, compiling.GLIBC))}_{published}"
        else:
            library = compiling.compile_library(source, folder)
            system = f"linux_{platform.machine()}"
        build_data["force_include"][str(library)] = f"moepack/running/pager/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"


def _compile_in_place(compiling: ModuleType, source: Path) -> None:
    machine = platform.machine()
    if compiling.find_compiled(source, source.parent, machine) is None:
        for old in source.parent.glob(f"{source.stem}-*-{machine}-*.so"):
            old.unlink()
        compiling.compile_library(source, source.parent)


def _load(path: Path) -> ModuleType:
    """Import a file by its path: moepack itself is not importable while it is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
