"""Recordings of a real model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moepack.trace.recording.recording import record_trace
from moepack.trace.summary import TraceSummary
from tests.support.models import first_shard

PROMPTS = ["A cook in a small kitchen", "keeps the knives,", "the salt and the oil within reach"]


def record_to(path: Path, prompts: Sequence[str] = PROMPTS, **options: Any) -> TraceSummary:
    options = {"context": 64, "threads": 2, "tokens": 8} | options
    return record_trace(first_shard("qwen3moe"), prompts, path, **options)
