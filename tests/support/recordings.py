"""Recordings of a real model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moepack.running.recording.recording import record_trace
from moepack.traces.file_records import join
from moepack.traces.formats import registry
from moepack.traces.model import Origin, Tokens
from moepack.traces.summary import TraceSummary
from moepack.traces.validation import Checks
from tests.support.gguf_builder import F32, TensorSpec, moe
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


def larger_than_memory(path: Path) -> Path:
    """Write a model that is nearly all a hole, and that has too few keys for llama.cpp to run."""
    rows = (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 256 + 1
    builder = moe()
    builder.tensors.append(TensorSpec("output.weight", (64, rows), F32, b""))
    builder.write(path)
    os.truncate(path, path.stat().st_size + 256 * rows)
    return path
