"""fio, the peer of what reads from a drive."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from moepack.bench.drive import Usage
from moepack.common.errors import MachineError


def cpu_per_gib(usages: Sequence[Usage]) -> list[float]:
    """Return the CPU seconds a GiB."""
    return [usage.cpu_seconds_per_gib(usage.length) for usage in usages]


def is_installed() -> bool:
    """Return whether there is a fio."""
    return shutil.which("fio") is not None


def random_reads(path: Path, length: int, depth: int, *how_many: str) -> Usage:
    """Let fio read blocks of `length` bytes at random, past the page cache; `how_many` of them."""
    command = [
        *("fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={length}"),
        *("--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", "--output-format=json"),
        *how_many,
    ]
    # malloc asks for huge pages then: its buffers, like ours, are read into faster.
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise MachineError(f"fio failed: {done.stderr}", path=path)
    job = json.loads(done.stdout)["jobs"][0]
    read = job["read"]
    seconds = read["runtime"] / 1e3
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return Usage(seconds, cpu_seconds, read["total_ios"], read["io_bytes"])
