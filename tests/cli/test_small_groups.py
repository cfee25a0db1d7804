"""Running models within a control group that is hardly large enough for them, or not."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from moepack.bench.control_group import control_group
from moepack.cli.running.models import say_memory
from moepack.pack.opening.open_model import open_model
from moepack.running.streaming.supervisor import StreamingOptions, Supervisor
from tests.support import architectures
from tests.support.children import MOEPACK, PATIENCE, Piped, run_command
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.own_groups import lay_groups
from tests.support.supervised import ROOT

pytestmark = [pytest.mark.long, needs_llama]
MIB = 1 << 20
CONTEXT = 8192


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small model whose keys and values are as long as those of a large one."""
    heads = dict.fromkeys(("head_count", "head_count_kv"), 8)
    heads |= dict.fromkeys(("key_length", "value_length"), 512)
    attention: Any = {f"attention.{name}": count for name, count in heads.items()}
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    return architectures.write("qwen3moe", path, block_count=8, context_length=CONTEXT, **attention)


def within(
    length: int, *command: str | int | Path, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command within a limit of memory."""
    with control_group(length) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        return run_command(*group.command([*map(str, command)]), **options)


def test_where_no_memory_is_free_the_least_is_taken() -> None:
    """Less than the margin is left."""
    shard = first_shard("qwen3moe")
    end = within(300 * MIB, *MOEPACK, "run", shard, "-p", "Hello", "-n", 2, "-t", 1, "-c", 64)
    assert end.returncode == 0, end.stderr
    assert "note: more than is free, less a margin" in end.stderr
    assert "its control group allows 300.0 MiB" in end.stderr


def test_more_memory_than_the_group_has_is_said_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sizes that are written alike are never said to be different."""
    lay_groups(tmp_path, "0::/a", {"a/memory.max": str(MIB)}, monkeypatch)
    options = StreamingOptions(memory=MIB + 4096, micro_batch=1)
    with (
        click.Context(click.Command("run")),
        open_model([first_shard("qwen3moe")]) as pack,
        Supervisor(pack, options, print) as supervisor,
    ):
        say_memory(supervisor)
    errors = capsys.readouterr().err
    assert errors.startswith("memory for experts: 1.0 MiB of ")
    assert "note: that is 4.0 KiB too much: its control group allows 1.0 MiB" in errors


def test_earlier_prompts_never_take_the_memory_of_the_server(model: Path) -> None:
    """Each is kept in 31 MiB: without a limit the sixth would be one too many."""
    options = ("--port", "0", "-t", "1", "-c", "512", "--no-learn", "--", "-ub", "512")
    with control_group(320 * MIB) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        command = group.command([*MOEPACK, "serve", str(model), *options])
        with Piped(*command) as process, httpx.Client(timeout=PATIENCE) as client:
            url = process.stdout.readline().split()[-1]
            for number in range(7):
                prompt = [number, *range(249)]
                answer = client.post(f"{url}/completion", json={"prompt": prompt, "n_predict": 1})
                assert answer.json()["timings"]["prompt_n"] == len(prompt)
            process.terminate()
            errors = process.stderr.read()
    assert re.search(r"; dense weights [0-9.]+ MiB, context of 512 tokens 64.0 MiB, .*", errors)


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-c", CONTEXT, "-p", "Hello", "{}"),
        ("serve", "-c", CONTEXT, "--port", 0, "{}"),
        ("run", "{}", "--", sys.executable, "-c", "b'x' * (1 << 30)"),
        ("run", "{}", "--", "sh", "-c", f"{sys.executable} -c 'b\"x\" * (1 << 30)'; exit $?"),
    ],
)
def test_a_program_that_is_killed_for_memory_is_said_to_be(
    words: tuple[str | int, ...], model: Path
) -> None:
    end = within(300 * MIB, *MOEPACK, *(model if word == "{}" else word for word in words))
    assert "was killed, out of memory: its control group allows 300.0 MiB" in end.stderr
    assert "\nhint: less " in end.stderr
    assert end.returncode in (6, -9, 137)


LIMIT = 640 << 20
"""Of it, 512 MiB are the margin that is left to all else."""
SIZES: dict[str, Any] = {
    **{"block_count": 12, "expert_count": 48, "embedding_length": 512},
    **{"expert_feed_forward_length": 768, "expert_used_count": 12, "context_length": 1024},
}
"""Of a model with 890 MiB of experts, which are holes in its file."""
QUESTION = f"[{random.Random(1).choices(range(3, 250), k=120)}]\n"
"""It needs so many experts that with all of those in memory the group is killed."""


def test_a_model_that_is_bigger_runs_to_its_end(tmp_path: Path) -> None:
    model = architectures.write("qwen3moe", tmp_path / "m.gguf", has_experts=False, **SIZES)
    assert model.stat().st_size > LIMIT
    program = [sys.executable, "-m", "tests.support.llama_program", "{}"]
    end = within(LIMIT, *MOEPACK, "run", model, "--", *program, input=QUESTION, cwd=ROOT)
    assert end.returncode == 0, end.stderr
    ready, answers = end.stdout.splitlines()
    assert (ready, len(json.loads(answers))) == ("ready", 1)
    assert "lookups hit" in end.stderr
