"""A slow drive: a library, loaded before all others, lets every read of a process take longer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_CALLS = {
    "pread": "(int file, void *data, size_t length, off_t offset), (file, data, length, offset)",
    "preadv": "(int file, const struct iovec *parts, int count, off_t offset), "
    "(file, parts, count, offset)",
    "preadv2": "(int file, const struct iovec *parts, int count, off_t offset, int flags), "
    "(file, parts, count, offset, flags)",
}
_NAMES = {
    "pread": ("pread", "pread64"),
    "preadv": ("preadv", "preadv64"),
    "preadv2": ("preadv2", "preadv64v2"),
}
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define SLOWED(name, parameters, arguments)                          \\
    ssize_t name parameters                                          \\
    {                                                                \\
        ssize_t(*real) parameters;                                   \\
        *(void **)&real = dlsym(RTLD_NEXT, #name);                   \\
        nanosleep(&(struct timespec){0, MICROSECONDS * 1000L}, 0);   \\
        return real arguments;                                       \\
    }

"""


def slowed(folder: Path, milliseconds: float) -> dict[str, str]:
    """Return an environment in which positioned reads take so much longer; skip without gcc.

    Reads by io_uring are not slowed, nor those of memory maps.
    """
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc here")
    source, library = folder / "slow.c", folder / "slow.so"
    lines = [f"SLOWED({name}, {_CALLS[of]})" for of, names in _NAMES.items() for name in names]
    source.write_text(_SOURCE + "\n".join([*lines, ""]))
    define = f"-DMICROSECONDS={round(milliseconds * 1000)}"
    command = ["gcc", "-O2", "-shared", "-fPIC", define, str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return os.environ | {"LD_PRELOAD": str(library)}
