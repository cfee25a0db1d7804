"""Recordings of a real model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moepack.running.serving.recording import record_trace
from moepack.traces.formats import registry
from moepack.traces.model import Origin, Tokens, join
from moepack.traces.steps import TraceSummary
from moepack.traces.validation import Checks
from tests.support.models import first_shard

PROMPTS = ["A cook in a small kitchen", "keeps the knives,", "the salt and the oil within reach"]


def record_to(path: Path, prompts: Sequence[str] = PROMPTS, **options: Any) -> TraceSummary:
    # One thread: more of them wait for each other in loops, for as long as other tests run.
    options = {"context": 64, "threads": 1, "tokens": 8} | options
    return record_trace(first_shard("qwen3moe"), prompts, path, **options)


def read_recording(path: Path) -> tuple[Origin, Tokens]:
    """Return the origin of a recording, and all of its tokens; it has nothing else."""
    origin, *pieces = registry.read(str(path), Checks(str(path)))
    assert isinstance(origin, Origin)
    tokens = [piece for piece in pieces if isinstance(piece, Tokens)]
    assert len(tokens) == len(pieces)
    return origin, join(tokens)
