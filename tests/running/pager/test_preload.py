"""The preloaded library is C without a complaint of compilers and sanitizers."""

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from tests.support.children import PATIENCE
from tests.support.needs import needs_llama
from tests.support.pagers import SLOTS, Alone, Form, Program, answers, paging

SOURCE = Path(str(resources.files("moepack.running.pager"))) / "preload.c"
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wconversion", "-Werror")
SHARED = ("-shared", "-fPIC", "-g")


def compile_with(compiler: str, *arguments: str | Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    run = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(("compiler", "level"), [("gcc", "-O0"), ("gcc", "-O3"), ("clang", "-O2")])
def test_it_compiles_without_warnings(tmp_path: Path, compiler: str, level: str) -> None:
    conversion = "-Wno-sign-conversion"
    compile_with(compiler, *WARNINGS, conversion, level, *SHARED, SOURCE, "-o", tmp_path / "a.so")


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
def test_it_runs_clean_under_sanitizers(
    form: Form, alone: Alone, tmp_path: Path, kind: str
) -> None:
    library = tmp_path / "preload.so"
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")
    compile_with("gcc", *SHARED, *flags, SOURCE, "-o", library)
    ask = ["gcc", "-print-file-name=libasan.so"]
    path = subprocess.check_output(ask, text=True).strip()
    if not Path(path).is_absolute():
        pytest.skip("there is no libasan.so here")
    with paging(form("qwen3moe", kind), memory="floor", micro_batch=1) as run:
        names = run.environment | {
            "LD_PRELOAD": f"{path}:{library}",
            "ASAN_OPTIONS": "detect_leaks=0",
        }
        with Program(run.pager.model_path, *SLOTS, **names) as program:
            assert answers(program) == alone("qwen3moe")
            assert "runtime error" not in program.complaint
            assert "Sanitizer" not in program.complaint
        assert run.pager.usage.miss_count > 0
