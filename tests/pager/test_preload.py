"""The preloaded library is C that compilers and sanitizers have nothing to say about."""

import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from tests.support.children import PATIENCE
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.pagers import PROMPTS, Program, paging

Form = Callable[[str, str], Path]
SOURCE = Path(str(resources.files("moepack.pager"))) / "preload.c"
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wconversion", "-Werror")
SHARED = ("-shared", "-fPIC", "-g")


def compile_with(compiler: str, *arguments: str | Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    run = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_it_compiles_without_warnings(tmp_path: Path, compiler: str, level: str) -> None:
    conversion = "-Wno-sign-conversion"
    compile_with(compiler, *WARNINGS, conversion, level, *SHARED, SOURCE, "-o", tmp_path / "a.so")


@needs_llama
@pytest.mark.parametrize("kind", ["pack", "gguf"])
@pytest.mark.parametrize(
    ("sanitizer", "runtime"), [("undefined", "libubsan.so"), ("address", "libasan.so")]
)
def test_it_runs_clean_under_sanitizers(
    form: Form, tmp_path: Path, kind: str, sanitizer: str, runtime: str
) -> None:
    library = tmp_path / "preload.so"
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1")
    compile_with("gcc", *SHARED, *flags, SOURCE, "-o", library)
    path = subprocess.check_output(["gcc", f"-print-file-name={runtime}"], text=True).strip()
    if not Path(path).is_absolute():
        pytest.skip(f"there is no {runtime} here")
    with Program(first_shard("qwen3moe"), "--slots", 4) as program:
        expected = [program.ask(*prompts) for prompts in PROMPTS]
    with paging(form("qwen3moe", kind), memory="floor", micro_batch=1) as run:
        names = run.environment | {
            "LD_PRELOAD": f"{path}:{library}",
            "ASAN_OPTIONS": "detect_leaks=0",
        }
        with Program(run.pager.model_path, "--slots", 4, **names) as program:
            assert [program.ask(*prompts) for prompts in PROMPTS] == expected
            assert "runtime error" not in program.complaint
            assert "Sanitizer" not in program.complaint
        assert run.pager.usage.miss_count > 0
