"""Recordings of a real model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moepack.trace import file
from moepack.trace.recording.recorder import Summary, record
from tests.support.models import first_shard

PROMPTS = ["A cook in a small kitchen", "keeps the knives,", "the salt and the oil within reach"]


def record_to(path: Path, prompts: Sequence[str] = PROMPTS, **options: Any) -> Summary:
    options = {"context_length": 64, "threads": 2, "count": 8} | options
    with file.Writer(path) as writer:
        return record(str(first_shard("qwen3moe")), prompts, writer, **options)
