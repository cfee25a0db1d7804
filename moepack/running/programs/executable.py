"""Find the executable of a command, and refuse those into which no library can be loaded.

Files that cannot be understood pass: the system has its own words for them when they are started.
"""

import os
import platform
import re
import shlex
import shutil
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from moepack.common.errors import RequestError
from moepack.running.programs.compiling import MACHINES

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit codes that shells give."""
_CONTAINER_PROGRAMS = {"docker", "podman", "nerdctl", "docker-compose", "podman-compose"}
_INTERPRETER_LENGTH = 4096  # as in Linux
_PT_INTERP = 3
_OF_64_BITS = b"\2\1"
"""In the header: 64 bits, little-endian."""
_DYNAMIC_LINKER = re.compile(r"ld(-linux|-musl|64)?[-.\w]*\.so(\.\d+)?")


class CommandError(RequestError):
    """A command cannot be started; a shell would end with `exit_code`."""

    def __init__(
        self, problem: str, *, path: str | os.PathLike[str], exit_code: int, hint: str | None = None
    ) -> None:
        super().__init__(problem, path=path, hint=hint)
        self.exit_code = exit_code


def find_executable(command: str) -> Path:
    """Return the path of the executable that a shell would start for a command's first word.

    Raises CommandError.
    """
    if (path := shutil.which(command)) is not None:
        return Path(path)
    if os.path.lexists(command) and "/" in command:
        hint = f"chmod +x {shlex.quote(command)}" if os.path.isfile(command) else None
        problem = "not an executable file"
        raise CommandError(problem, path=command, exit_code=NOT_EXECUTABLE, hint=hint)
    hint = None if "/" in command else "it is in none of the folders of PATH"
    if hint and command.startswith("llama-"):
        hint += "; llama.cpp's programs are at https://github.com/ggml-org/llama.cpp/releases"
    raise CommandError("no such program", path=command, exit_code=NOT_FOUND, hint=hint)


def check_executable(path: Path) -> None:
    """Raise CommandError if no library can be loaded into the program at `path`.

    A script passes: what it starts is not known.
    """
    if path.name in _CONTAINER_PROGRAMS:
        problem = "it starts programs in containers, which moepack's library does not reach"
        hint = "run moepack in the container, before the program: … moepack run MODEL -- PROGRAM"
        raise CommandError(problem, path=path, exit_code=NOT_EXECUTABLE, hint=hint)
    elf = None
    with suppress(OSError), path.open("rb") as file:  # it may be executable and not readable
        elf = _read_elf(file)
    if elf is not None:
        _check_binary(path, elf)


_Elf = tuple[bool, str | None]
"""An ELF header: whether it is for this machine, and the dynamic linker's path."""


def _check_binary(path: Path, elf: _Elf) -> None:
    (is_ours, interpreter), problem = elf, None
    if not is_ours:
        problem = "a program for another machine"
        hint = f"use a build for {platform.machine()} with 64 bits"
    elif interpreter is None:
        if not _DYNAMIC_LINKER.fullmatch(path.name):
            problem = "linked statically: no library can be loaded into it"
            hint = "use a build that is linked dynamically, as llama.cpp's own releases are"
    elif _is_musl(interpreter) != _is_musl(_our_interpreter()):
        theirs, other = ("musl", "glibc") if _is_musl(interpreter) else ("glibc", "musl")
        problem = f"linked with {theirs}, while moepack's library is with {other}"
        hint = f"use a build for {other}, or run moepack where the program was built"
    if problem is None and (privilege := _privilege(path)):
        problem = f"it runs with {privilege}: the system loads no library of a user into it"
        hint = f"use a copy without these: cp {shlex.quote(str(path))} ."
    if problem is not None:
        raise CommandError(problem, path=path, exit_code=NOT_EXECUTABLE, hint=hint)


def _read_elf(file: BinaryIO) -> _Elf | None:
    """Read an ELF file's header; None for a cut or senseless one too."""
    file.seek(0)
    header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return None
    machine = struct.unpack_from("<H", header, 18)[0]
    if header[4:6] != _OF_64_BITS or machine != MACHINES.get(platform.machine(), machine):
        return False, None
    offset = struct.unpack_from("<Q", header, 32)[0]
    size, count = struct.unpack_from("<HH", header, 54)
    if size != 56 or not count:
        return None
    table = _read_at(file, offset, size * count)
    for kind, _, start, _, _, length, _, _ in struct.iter_unpack("<IIQQQQQQ", table or b""):
        if kind == _PT_INTERP:
            text = _read_at(file, start, length) if length <= _INTERPRETER_LENGTH else None
            return None if text is None else (True, os.fsdecode(text.rstrip(b"\0")))
    return None if table is None else (True, None)


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes | None:
    if offset >= 1 << 63:
        return None
    file.seek(offset)
    content = file.read(length)
    return content if len(content) == length else None


def _is_musl(interpreter: str) -> bool:
    return os.path.basename(interpreter).startswith("ld-musl")


def _our_interpreter() -> str:
    """Return the dynamic linker of this Python: our library is built for the same C library."""
    try:
        with open("/proc/self/exe", "rb") as file:
            elf = _read_elf(file)
    except OSError:
        elf = None
    return (elf and elf[1]) or ""


def _privilege(path: Path) -> str | None:
    """Return rights with which the dynamic linker ignores LD_PRELOAD: those its user lacks."""
    status = path.stat()
    if os.statvfs(path).f_flag & os.ST_NOSUID:
        return None
    if status.st_mode & stat.S_ISUID and status.st_uid != os.getuid():
        return "the rights of its owner (setuid)"
    is_setgid = status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IXGRP
    if is_setgid and status.st_gid != os.getgid():
        return "the rights of its group (setgid)"
    try:
        os.getxattr(path, "security.capability")
    except OSError:
        return None
    return "capabilities of its file" if os.getuid() != 0 else None
