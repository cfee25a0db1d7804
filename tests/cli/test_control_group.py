"""`moepack run MODEL -- PROGRAM` in a control group that is smaller than the model."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from moepack.bench.control_group import control_group
from tests.support import architectures
from tests.support.children import MOEPACK, run_command
from tests.support.needs import needs_llama
from tests.support.pagers import ROOT

pytestmark = [needs_llama, pytest.mark.long]

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
    command = [*MOEPACK, "run", str(model), "--", *program]
    with control_group(LIMIT) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        end = run_command(*group.command(command), input=QUESTION, cwd=ROOT)
    assert end.returncode == 0, end.stderr
    ready, answers = end.stdout.splitlines()
    assert (ready, len(json.loads(answers))) == ("ready", 1)
    assert "lookups hit" in end.stderr
