"""Build wheels: with the manual pages, and the libraries of native/ where the machine can.

A wheel brings them and is of one machine then; without a compiler the wheel is for all machines,
and they are compiled at first use. MOEPACK_WHEEL_MACHINE names the machine of a wheel that is to
be published (x86_64, aarch64): they are compiled with zig for all systems since a certain glibc.
"""

import importlib.util
import os
import platform
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Put the libraries beside their sources, in wheels and in checkouts; make manual pages."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of a wheel are gathered; `editable` stays in the checkout."""
        native = Path(self.root, "native")
        if version != "editable":  # a folder as a whole would bring old libraries of a checkout
            # It is removed with the hook, when the wheel is written.
            self._folder = tempfile.TemporaryDirectory()
            for path in native.glob("*.[ch]"):
                build_data["force_include"][str(path)] = f"moepack/native/{path.name}"
            self._add_manual(build_data)
        if platform.system() != "Linux" or not native.exists():
            return
        compiling = _load(Path(self.root, "moepack", "running", "programs", "compiling.py"))
        published = os.environ.get("MOEPACK_WHEEL_MACHINE")
        try:
            if version == "editable":
                compiling.compile_in_place(native)
            else:
                self._add_to_wheel(compiling, native, published, build_data)
        except (compiling.CompileError, OSError) as error:
            if published:
                raise
            self.app.display_warning(f"the libraries are compiled at first use: {error}")

    def _add_manual(self, build_data: dict[str, Any]) -> None:
        manual = Path(self._folder.name, "man1")
        manual.mkdir()
        pages = Path(self.root, "docs", "commands")
        _load(Path(self.root, "docs", "man_pages.py")).write(pages, manual, self.metadata.version)
        build_data["shared_data"][str(manual)] = "share/man/man1"

    def _add_to_wheel(
        self, compiling: ModuleType, native: Path, published: str | None, build_data: dict[str, Any]
    ) -> None:
        folder = Path(self._folder.name)
        system = f"linux_{platform.machine()}"
        if published:
            system = f"manylinux_{'_'.join(map(str, compiling.GLIBC))}_{published}"
        for name in compiling.SOURCES:
            if published:
                library = compiling.cross_compile_library(native, name, folder, published)
            else:
                library = compiling.compile_library(native, name, folder)
            build_data["force_include"][str(library)] = f"moepack/native/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}"


def _load(path: Path) -> ModuleType:
    """Import a file by its path: moepack itself is not importable while it is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
