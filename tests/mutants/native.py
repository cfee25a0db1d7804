"""Mutants of the C in `native/`: each has a small mistake, and a test must fail because of it.

`python -m tests.mutants.native FILE… --most 200 --seed 1` prints those that no test finds, and how
many each file has. Mutants that compile to the same code as the file, or as an earlier one, are
none. Programs of tests/native are tried first, then the tests of TESTS, one after the other.

Some survive by right, as nobody can see them:

- bounds in `order.c` that are too low, advice to the system, timeouts and looking again cost time;
- sizes are of whole pages, so that a byte more or less rounds alike; buffers are larger than names,
  and no memory is of 2^61 bytes;
- times of uses are never equal, and glibc's `qsort` keeps the order of equals;
- loops over classes, and over parts for advice, may look at one more, which is empty;
- values that are set before they are read, and words of a system call that its flags leave unused;
- the parts of a mirrored expert lie in one file, and standard input is no file of a pack;
- `regions.c`, `ggml.c` and `finish_step` refuse what no program does yet: a model in 4,096 pieces,
  or mapped to be written, tensors laid out otherwise, a failure without an error;
- a fault that is called served, and was not, comes again: after 1,000 it is the program's own;
- locks of the seam, and signals that wait while it serves a fault, show in one race of millions:
  programs of llama.cpp are compiled without a sanitizer of threads.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from moepack.packing.pack_model import pack_model
from moepack.running.programs import compiling
from tests.mutants.c_mutations import Mutant, mutants_of
from tests.support.models import first_shard
from tests.support.native_programs import MEMORY_AND_PLACE, PROGRAMS, Program

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "native-mutants"
TREE = BUILD / "tree"
"""A copy of the project, in which one file is changed at a time."""
SURVIVED = "SURVIVED"

PLAIN = "plain"
PACK, FILES = BUILD / "pack", BUILD / "files"
SECONDS = 20.0
"""After so long a program hangs; it is counted while this process runs, which may be stopped."""
_STREAMING = [
    "whole_files",
    "edges",
    "selections",
    "several",
    "damage",
    "warm_up",
    "memory",
    "leaving",
]
TESTS: dict[str, list[tuple[str, ...]]] = {
    "cache": [("tests/native/test_expert_cache.py", "-k", "not header")],
    "seam": [
        *((f"tests/running/streaming/test_{one}.py",) for one in _STREAMING),
        ("tests/native/test_native.py", "-k", "chunks"),
    ],
}


PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:timeout")


def fails(command: Sequence[object], cwd: Path = BUILD, seconds: float = SECONDS) -> bool:
    """Run a command; return whether it fails, or hangs."""
    names = {**os.environ, "PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=names,
        start_new_session=True,
        stdin=null,
        stdout=null,
        stderr=null,
    )
    for _ in range(int(seconds * 50)):
        if process.poll() is not None:
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait() != 0


class Trial:
    """The tests of mutants of one file, of which everything else is compiled once."""

    def __init__(self, name: str, is_quick: bool) -> None:
        self.name, self.path = name, TREE / "native" / f"{name}.c"
        self.is_quick = is_quick
        self.text = self.path.read_text()
        self.seen = {_object(PLAIN, name).read_bytes()}
        for kind in (PLAIN,) if is_quick else (PLAIN, MEMORY_AND_PLACE, "thread"):
            assert not self._failing_program(kind, _object(kind, name))

    def verdict(self, mutant: Mutant) -> str | None:
        """Return the test that fails, "" if none does; None if it is no mutant."""
        text = self.text[: mutant.start] + mutant.text + self.text[mutant.end :]
        self.path.write_text(text)
        try:
            return self._verdict()
        finally:
            self.path.write_text(self.text)

    def _verdict(self) -> str | None:
        changed = BUILD / "mutant.o"
        if fails(["gcc", *_flags(PLAIN), "-c", self.path, "-o", changed]):
            return None
        content = changed.read_bytes()
        if content in self.seen:
            return None
        self.seen.add(content)
        if (found := self._failing_program(PLAIN, changed)) or self.is_quick:
            return found
        return (
            self._failing_sanitized(MEMORY_AND_PLACE)
            or self._failing_sanitized("thread")
            or self._failing_tests()
        )

    def key_of(self, mutant: Mutant) -> str:
        """Return the place of a mutant, and what it replaces by what."""
        line = self.text.count("\n", 0, mutant.start) + 1
        words = (self.text[mutant.start : mutant.end], mutant.text or "nothing")
        before, after = (" ".join(one.split()) for one in words)
        return f"{self.name}.c:{line}: {before} → {after}"

    def _failing_program(self, kind: str, changed: Path) -> str:
        for name, program in sorted(PROGRAMS.items(), key=lambda one: one[0] != self.name):
            if self.name not in program.files or kind not in (PLAIN, *program.sanitizers):
                continue
            objects = [_object(kind, name, "tests/native"), *self._objects(kind, program, changed)]
            wrapped = [f"-Wl,--wrap={one}" for one in program.wrapped]
            target = BUILD / "program"
            link = ["gcc", *_flags(kind), *wrapped, *objects, "-lm", "-lpthread", "-o", target]
            assert not fails(link)
            places = {"folder": FILES, "pack": PACK}
            if any(fails([target, *run.format(**places).split()]) for run in program.runs):
                return name if kind == PLAIN else f"{name}, {kind}"
        return ""

    def _failing_sanitized(self, kind: str) -> str:
        changed = BUILD / "sanitized.o"
        assert not fails(["gcc", *_flags(kind), "-c", self.path, "-o", changed])
        return self._failing_program(kind, changed)

    def _failing_tests(self) -> str:
        for library, names in compiling.SOURCES.items():
            for tests in TESTS[library] if self.name in names else ():
                if fails([*PYTEST, *tests], TREE, 10 * SECONDS):
                    return tests[0]
        return ""

    def _objects(self, kind: str, program: Program, changed: Path) -> list[Path]:
        return [changed if one == self.name else _object(kind, one) for one in program.files]


def _flags(kind: str) -> Sequence[str]:
    if kind == PLAIN:
        return ("-std=c17", "-w", "-O2", "-fPIC", "-fvisibility=hidden")
    return ("-std=c17", "-w", "-O1", f"-fsanitize={kind}", "-fno-sanitize-recover=all")


def _object(kind: str, name: str, folder: str = "native") -> Path:
    """Return a file compiled once, of native/ or another folder, as it is in the tree."""
    target = BUILD / kind / folder / f"{name}.o"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source = TREE / folder / f"{name}.c"
        assert not fails(["gcc", *_flags(kind), "-c", source, "-o", target])
    return target


def copy_project() -> None:
    """Copy the project to TREE."""
    shutil.rmtree(BUILD, ignore_errors=True)
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).exists():
            continue
        target = TREE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)


def prepare() -> None:
    """Copy the project, and make a pack for the programs."""
    copy_project()
    FILES.mkdir()
    pack_model([first_shard("qwen3moe")], PACK)


def tried(trial: Trial, mutants: Iterable[Mutant], most: int, keys: Container[str]) -> Counter[str]:
    """Try up to `most` mutants; print each, and count them by what fails."""
    counts = Counter[str]()
    for mutant in mutants:
        if counts.total() == most:
            break
        key = trial.key_of(mutant)
        found = trial.verdict(mutant) if not keys or key in keys else None
        if found is not None:
            counts[found] += 1
            print(f"{key}: {found or SURVIVED}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="FILE", help="Names in native/, without .c.")
    parser.add_argument("--most", type=int, default=1 << 30, help="Mutants of each file.")
    parser.add_argument("--seed", type=int, default=1, help="Of the sample.")
    parser.add_argument("--quick", action="store_true", help="Only programs.")
    parser.add_argument("--again", type=Path, help="Only what survived in this output.")
    options = parser.parse_args()
    lines = options.again.read_text().splitlines() if options.again else []
    keys = {line.removesuffix(f": {SURVIVED}") for line in lines if line.endswith(SURVIVED)}
    prepare()
    for name in options.names:
        trial = Trial(name, options.quick)
        mutants = mutants_of(trial.text)
        random.Random(options.seed).shuffle(mutants)
        print(f"{name}.c: {dict(tried(trial, mutants, options.most, keys))}", flush=True)


if __name__ == "__main__":
    main()
