"""Keeps what routers chose while a server answered, as a trace: running is recording."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

import numpy as np

from moepack.pager.record import Batch
from moepack.reading.pack import Pack
from moepack.trace.file import RECORDED
from moepack.trace.file_writer import Writer
from moepack.trace.model import Origin, Phase, Tokens

_MOST_NAME = 1 << 10


class TraceWriter:
    """Writes a trace of the model in `pack` to `path`; a context manager.

    Each text is a request, and is kept when it has ended. Raises what a trace's `Writer` raises.
    """

    def __init__(self, path: str | os.PathLike[str], pack: Pack) -> None:
        self._writer = Writer(path)
        self._origin = origin_of_pack(pack)
        self._request_count = 0

    def __enter__(self) -> Self:
        self._writer.__enter__()
        self._writer.add(self._origin)
        return self

    def __exit__(self, *exception: object) -> None:
        # What was kept stays, whatever ended the program.
        self._writer.keep()
        self._writer.__exit__(None, None, None)

    def add(self, batches: Sequence[Batch], prompt_count: int) -> None:
        """Add a text, in calls of the model; the first `prompt_count` tokens are the prompt's."""
        first = 0
        for batch in batches:
            tokens = _tokens_of(batch, self._request_count, first, prompt_count)
            first += len(tokens.request)
            self._writer.add(tokens)
        self._request_count += bool(batches)


def origin_of_pack(pack: Pack) -> Origin:
    """Return what a recording says of the model in `pack`, the same as of its shards."""
    shape, source = pack.shape.without_mtp(), pack.manifest.source
    return Origin(
        RECORDED,
        source.shards[0].name,
        model=source.name and source.name[:_MOST_NAME],
        expert_counts=shape.expert_counts,
        experts_used=shape.experts_used,
    )


def _tokens_of(batch: Batch, request: int, first: int, prompt_count: int) -> Tokens:
    """Return the tokens of a call, the first of which is the text's token `first`.

    Layers that computed fewer tokens computed the last ones.
    """
    count = max(len(rows) for rows in batch.values())
    starts = np.zeros(count + 1, np.int64)
    layers, experts = [], []
    for token in range(count):
        length = 0
        for layer, rows in batch.items():
            row = token - (count - len(rows))
            if row >= 0:
                layers.append(np.full(rows.shape[1], layer, np.uint16))
                experts.append(rows[row])
                length += rows.shape[1]
        starts[token + 1] = starts[token] + length
    is_prompt = np.arange(first, first + count) < prompt_count
    return Tokens(
        np.full(count, request, np.int64),
        np.where(is_prompt, Phase.PREFILL, Phase.DECODE).astype(np.uint8),
        starts,
        np.concatenate(layers),
        np.concatenate(experts),
    )
