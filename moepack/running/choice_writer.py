"""Keeps what routers chose while a model ran, as a trace: running is recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Self

from moepack.llama_cpp.decoding import Chosen
from moepack.reading.pack import Pack
from moepack.trace.file import RECORDED
from moepack.trace.file_writer import Writer
from moepack.trace.model import Origin, Phase
from moepack.trace.recording.choices import tokens_of


class ChoiceWriter:
    """Writes a trace of the model in `pack` to `path`; a context manager.

    Each text is a request; it is kept when it has ended. Raises what a trace's `Writer` raises.
    """

    def __init__(self, path: str | os.PathLike[str], pack: Pack) -> None:
        shape = pack.shape.without_mtp()
        self._writer = Writer(path)
        self._origin = Origin(
            RECORDED,
            pack.path.name,
            model=pack.manifest.source.name,
            expert_counts=shape.expert_counts,
            experts_used=shape.experts_used,
        )
        self._request_count = 0

    def __enter__(self) -> Self:
        self._writer.__enter__()
        self._writer.add(self._origin)
        return self

    def __exit__(self, *exception: object) -> None:
        # What was kept stays, whatever ended the program.
        self._writer.keep()
        self._writer.__exit__(None, None, None)

    def begin(self) -> Callable[[Sequence[int], Chosen, bool], None]:
        """Return what takes each call of the model for a request, which begins with the first."""
        number: int | None = None

        def chose(_: Sequence[int], chosen: Chosen, is_prompt: bool) -> None:
            nonlocal number
            if number is None:
                number = self._request_count
                self._request_count += 1
            phase = Phase.PREFILL if is_prompt else Phase.DECODE
            self._writer.add(tokens_of(chosen, number, phase))

        return chose
