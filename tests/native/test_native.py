"""The C of `native/` is without a complaint of compilers and sanitizers, alone and in programs."""

import subprocess
from pathlib import Path

import pytest

from moepack.running.programs.compiling import SOURCES
from tests.support.models import first_shard
from tests.support.native import NATIVE, compile_with, compiled_once, sources
from tests.support.needs import needs_llama
from tests.support.supervised import SLOTS, Program, answers, supervised

WARNINGS = ("-std=c17", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror")
CONVERSION = ("-Wconversion", "-Wno-sign-conversion")
ALONE = {
    "gcc": ("-Wno-maybe-uninitialized",),  # it takes what another function sets for unset
    "clang": ("-Wpedantic",),  # gcc's forbids what POSIX has of `dlsym`
}
_DECISIONS = ("residents", "prompts", "order", "slots")
DECISIONS = dict.fromkeys(("simulation", "prompts", "residents"), _DECISIONS)
"""The programs that test several files of `native/`; each other one tests that of its name."""
WRAPPED = {"drive": ("pread", "syscall"), "cache": ("pread",), "pool": ("mmap",)}
"""Calls that programs have in place of the system's, to cut reads short and to refuse them."""
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("compiler", "level"),
    [("gcc", "-O0"), ("gcc", "-O3"), ("clang", "-O2"), ("gcc", "-DCOMPARES")],
)
def test_it_compiles_without_warnings(tmp_path: Path, compiler: str, level: str, name: str) -> None:
    flags = (*WARNINGS, *CONVERSION, *ALONE[compiler], level, "-shared", "-fPIC")
    libraries = ("-lm", "-lpthread", "-ldl", "-o", tmp_path / "a.so")
    compile_with(compiler, *flags, *sources(name), *libraries)


def test_no_function_is_longer_than_sixty_lines() -> None:
    for path in NATIVE.glob("*.c"):
        start = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line or line.startswith(("#", "/", " *")):
                start = number
            if line == "}":
                assert number - start < 60, f"{path.name}:{start}"


def run_alone(name: str, seed: int = 0, count: int = 0) -> None:
    """Compile a program of this folder with what it tests, and run it: it finds nothing wrong."""
    files = [NATIVE / f"{one}.c" for one in DECISIONS.get(name, (name,))]
    source = Path(__file__).with_name(f"{name}.c")
    flags = (*WARNINGS, *SANITIZERS, *(f"-Wl,--wrap={one}" for one in WRAPPED.get(name, ())))
    program = compiled_once(name, "gcc", *flags, source, *files, "-lm")
    run = subprocess.run([program, str(seed), str(count)], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["guesses", "slots", "residents", "pool"])
def test_files_do_what_their_heads_say(name: str) -> None:
    run_alone(name)


@pytest.fixture(scope="session")
def core() -> Path:
    """Compile the cache, without its interface for engines, for programs to be linked with."""
    files = [*(one for one in sources("cache") if one.stem != "library"), NATIVE / "digest.c"]
    return compiled_once("core.o", "gcc", *WARNINGS, *SANITIZERS, "-r", *files)


@pytest.mark.parametrize("name", ["drive", "cache", "beside"])
def test_caches_read_what_is_used_and_what_will_be(core: Path, tmp_path: Path, name: str) -> None:
    flags = [*WARNINGS, *SANITIZERS, *(f"-Wl,--wrap={one}" for one in WRAPPED.get(name, ()))]
    source = Path(__file__).with_name(f"{name}.c")
    program = compiled_once(name, "gcc", *flags, source, core, "-lm", "-lpthread")
    run = subprocess.run([program, tmp_path], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    if run.stdout:
        assert run.stdout == "no io_uring\n"
        pytest.skip(run.stdout)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("name", "count"), [("order", 2000), ("prompts", 400)])
def test_policies_and_prompts_decide_as_the_page_says(name: str, count: int, seed: int) -> None:
    run_alone(name, seed, count)


@pytest.mark.parametrize("seed", range(10))
def test_decisions_keep_their_rules_whatever_happens(seed: int) -> None:
    run_alone("simulation", seed, 1000)


@pytest.mark.slow
def test_decisions_keep_their_rules_for_a_million_events() -> None:
    for seed in range(100, 600):
        run_alone("simulation", seed, 2000)


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("reads", [1, 2, 3])
def test_several_threads_share_a_cache(packs: dict[str, Path], sanitizer: str, reads: int) -> None:
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-std=gnu17", "-g", "-O1")
    source = Path(__file__).parent / "stress.c"
    files = (source, *sources("cache"))
    program = compiled_once("stress", "gcc", *flags, *files, "-lm", "-lpthread")
    words: tuple[object, ...] = (packs["qwen3moe"], 600_000, reads, 4, 100, 1)
    run = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    if run.returncode and "not permitted" in run.stdout:
        pytest.skip(run.stdout)
    assert (run.returncode, run.stderr) == (0, "")
    assert int(run.stdout) > 1000


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_programs_run_clean_under_sanitizers(packs: dict[str, Path], kind: str) -> None:
    flags = (*SANITIZERS, "-shared", "-fPIC", "-fvisibility=hidden")
    library = compiled_once("seam.so", "gcc", *flags, *sources("seam"), "-lm", "-ldl")
    path = subprocess.check_output(["gcc", "-print-file-name=libasan.so"], text=True).strip()
    if not Path(path).is_absolute():
        pytest.skip("there is no libasan.so here")
    model = packs["qwen3moe"] if kind == "pack" else first_shard("qwen3moe")
    with Program(first_shard("qwen3moe"), *SLOTS) as program:
        expected = answers(program)
    with supervised(model, memory="floor", micro_batch=1) as run:
        names = run.environment | {
            "LD_PRELOAD": f"{path}:{library}",
            "ASAN_OPTIONS": "detect_leaks=0",
        }
        with Program(run.supervisor.model_path, *SLOTS, **names) as program:
            assert answers(program) == expected
            assert "runtime error" not in program.complaint
            assert "Sanitizer" not in program.complaint
        assert run.supervisor.usage.miss_count > 0
