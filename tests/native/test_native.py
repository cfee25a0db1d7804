"""The C of `native/` is without a complaint of compilers and sanitizers, alone and in programs."""

import subprocess
from pathlib import Path

import pytest

from moepack.running.programs.compiling import SOURCES
from tests.support.models import first_shard
from tests.support.native import NATIVE, compile_with, compiled_once, sources
from tests.support.native_programs import MEMORY_AND_PLACE, PROGRAMS
from tests.support.needs import needs_llama
from tests.support.supervised import SLOTS, Program, answers, image_of, supervised

WARNINGS = ("-std=c17", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror")
CONVERSION = ("-Wconversion", "-Wno-sign-conversion")
ALONE = {
    "gcc": ("-Wno-maybe-uninitialized",),  # it takes what another function sets for unset
    "clang": ("-Wpedantic",),  # gcc's forbids what POSIX has of `dlsym`
}
LIBRARY = ("-shared", "-fPIC", "-fvisibility=hidden")


def sanitizing(kind: str) -> tuple[str, ...]:
    return ("-g", "-O1", f"-fsanitize={kind}", "-fno-sanitize-recover=all")


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


# programs of this folder


def compiled_program(name: str, sanitizer: str) -> Path:
    """Compile a program of this folder, and each file that it tests, once for all programs."""
    flags = (*WARNINGS, *sanitizing(sanitizer))
    own = Path(__file__).with_name(f"{name}.c")
    objects = [
        compiled_once(f"{path.stem}.o", "gcc", *flags, "-c", path)
        for path in (own, *(NATIVE / f"{one}.c" for one in PROGRAMS[name].files))
    ]
    wrapped = [f"-Wl,--wrap={one}" for one in PROGRAMS[name].wrapped]
    return compiled_once(name, "gcc", *flags, *wrapped, *objects, "-lm", "-lpthread")


def finds_nothing_wrong(program: Path, *words: object) -> None:
    run = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    if run.stdout == "no io_uring\n":
        pytest.skip(run.stdout)
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("name", "sanitizer", "run"),
    [
        (name, sanitizer, run)
        for name, program in PROGRAMS.items()
        for sanitizer in program.sanitizers
        for run in program.runs
    ],
)
def test_programs_find_nothing_wrong(
    packs: dict[str, Path], tmp_path: Path, name: str, sanitizer: str, run: str
) -> None:
    places = {"folder": tmp_path, "pack": packs["qwen3moe"]}
    words = (word.format(**places) for word in run.split())
    finds_nothing_wrong(compiled_program(name, sanitizer), *words)


@pytest.mark.slow
def test_decisions_keep_their_rules_for_a_million_events() -> None:
    program = compiled_program("simulation", MEMORY_AND_PLACE)
    for seed in range(100, 600):
        finds_nothing_wrong(program, seed, 2000)


# programs of llama.cpp


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_programs_run_clean_under_sanitizers(packs: dict[str, Path], kind: str) -> None:
    flags = (*sanitizing(MEMORY_AND_PLACE), *LIBRARY)
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


@pytest.mark.parametrize(
    ("model", "how"), [("qwen3moe", "renew"), ("gpt-oss", "cover"), ("granite", "cut")]
)
def test_chunks_of_an_image_that_are_given_up_take_nothing_else_with_them(
    packs: dict[str, Path], tmp_path: Path, model: str, how: str
) -> None:
    """With three chunks where programs have hundreds: nothing of experts or maps beside them."""
    flags = ("-O1", "-std=c17", "-DCHUNK_COUNT=3", *LIBRARY)
    library = compiled_once("seam.so", "gcc", *flags, *sources("seam"), "-lm", "-ldl")
    expected = image_of(packs[model], tmp_path / "expected")
    with supervised(packs[model], memory=1 << 30, micro_batch=1) as run:
        path, names = run.supervisor.model_path, run.environment | {"LD_PRELOAD": str(library)}
        with Program(path, expected, module="mapped_reader", **names) as program:
            for threads in (1, 4):
                assert program.call("compare", threads, 2) == 0, program.complaint
            assert program.call(how) == 0, program.complaint
        assert not run.failures
