"""moepack.h computes XXH3 in every way that it has, and each gives what xxhash gives."""

import platform
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.support.c_compiler import SANITIZERS, compiled

SOURCE = Path(__file__).parent / "digest_test.c"
C99 = ("-O1", "-std=c99")
SANITIZED = ("c++", "-O0", "-x", "c++", "-std=c++17", *SANITIZERS)
# Every length up to two blocks and a stripe, the ends of later blocks and stripes, and long ones.
LENGTHS = [
    *range(2114),
    *(1024 * blocks + more for blocks in (3, 4, 97) for more in (0, 1, 63, 64, 65, 960, 961)),
    *(100_000, 100_001, (1 << 20) + 1),
]


def fastest_here() -> str:
    """Name the way that is best on this machine, by what the system says of it."""
    if platform.machine() in ("aarch64", "arm64"):
        return "neon"
    if platform.machine() != "x86_64":
        return "plain"
    facts = Path("/proc/cpuinfo")
    if not facts.exists():
        pytest.skip("this system does not say whether the processor has AVX2")
    return "avx2" if "avx2" in facts.read_text().split() else "sse2"


def without_avx2() -> str:
    """Name the best of the other ways."""
    return "sse2" if platform.machine() == "x86_64" else fastest_here()


def require(*programs: str) -> None:
    """Skip the test where a program is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")


def require_xxhash() -> None:
    """Skip the test where there is no xxHash for C."""
    if not Path("/usr/include/xxhash.h").exists():
        pytest.skip("there is no xxhash.h here")


def build(target: Path, compiler: str, *flags: str) -> Path:
    run = compiled(compiler, *flags, SOURCE, "-o", target)
    assert (run.returncode, run.stderr) == (0, "")
    return target


def assert_digests(way: str, *command: str | Path) -> None:
    """Check the way that a program goes, and all that it says."""
    data = random.Random(0).randbytes(max(LENGTHS))
    run = subprocess.run(
        [*command, *map(str, LENGTHS)], input=data, capture_output=True, timeout=100, check=False
    )
    assert (run.returncode, run.stderr) == (0, b"")
    first, *digests = run.stdout.decode().splitlines()
    assert first == way
    for length, digest in zip(LENGTHS, digests, strict=True):
        assert digest == f"{xxhash.xxh3_64_intdigest(data[:length]):016x}", length


MACROS: dict[str, Callable[[], str]] = {
    "": fastest_here,
    "-DMOEPACK_NO_AVX2": without_avx2,
    "-DMOEPACK_NO_SIMD": lambda: "plain",
}


# Of each compiler one way, each time.
ALWAYS = {("sanitized", ""), ("gcc", "-DMOEPACK_NO_AVX2"), ("clang", "-DMOEPACK_NO_SIMD")}


@pytest.mark.parametrize(
    ("flags", "macro"),
    [
        pytest.param(flags, macro, marks=() if (name, macro) in ALWAYS else pytest.mark.slow)
        for name, flags in {
            "sanitized": SANITIZED,
            **{name: (name, *C99) for name in ("gcc", "clang")},
        }.items()
        for macro in MACROS
    ],
)
def test_every_way_gives_the_digests_of_xxhash(
    flags: tuple[str, ...], macro: str, tmp_path: Path
) -> None:
    macros = (macro,) if macro else ()
    assert_digests(MACROS[macro](), build(tmp_path / "program", *flags, *macros))


@pytest.mark.parametrize("how", ["-lxxhash", "-DXXH_INLINE_ALL"])
def test_so_does_xxhash_itself(how: str, tmp_path: Path) -> None:
    require_xxhash()
    program = build(tmp_path / "program", "gcc", "-O1", "-DMOEPACK_USE_XXHASH", how)
    assert_digests("xxhash", program)


@pytest.mark.parametrize(
    ("macro", "way"),
    [((), "neon"), pytest.param(("-DMOEPACK_NO_SIMD",), "plain", marks=pytest.mark.slow)],
    ids=["NEON", "no SIMD"],
)
def test_so_do_those_of_a_64_bit_arm(macro: tuple[str, ...], way: str, tmp_path: Path) -> None:
    require("aarch64-linux-gnu-gcc", "qemu-aarch64")
    program = build(tmp_path / "program", "aarch64-linux-gnu-gcc", *C99, "-static", *macro)
    assert_digests(way, "qemu-aarch64", program)


def test_a_processor_without_avx2_gets_none(tmp_path: Path) -> None:
    """The program is the same; only what the processor says of itself differs."""
    require("qemu-x86_64")
    if platform.machine() != "x86_64":
        pytest.skip("this machine compiles for another processor")
    program = build(tmp_path / "program", "gcc", *C99)
    assert_digests("sse2", "qemu-x86_64", "-cpu", "Nehalem", program)


def test_the_installed_xxhash_is_called_and_has_to_be_linked(tmp_path: Path) -> None:
    require_xxhash()
    run = compiled("cc", "-O0", "-DMOEPACK_USE_XXHASH", SOURCE, "-o", tmp_path / "program")
    assert run.returncode != 0
    assert "XXH3_64bits" in run.stderr


def test_an_xxhash_with_another_xxh3_is_refused(tmp_path: Path) -> None:
    """Up to 0.7.4 there was a function of that name, with other digests."""
    (tmp_path / "xxhash.h").write_text("#define XXH_VERSION_NUMBER 704\n")
    run = compiled("cc", "-DMOEPACK_USE_XXHASH", f"-I{tmp_path}", "-fsyntax-only", SOURCE)
    assert run.returncode != 0
    assert "needs xxHash 0.8.0 or later" in run.stderr
