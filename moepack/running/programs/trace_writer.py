"""Writes the routed experts of running programs as a trace."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moepack.common.errors import MoepackError, RequestError
from moepack.pack.reading.pack import Pack
from moepack.traces.file import RECORDED
from moepack.traces.file_writer import Writer
from moepack.traces.model import Origin, Phase, Unknown, tokens_of

Layers = Mapping[int, NDArray[np.uint16]]
_MOST_NAME = 1 << 10


class TraceWriter:
    """Writes a new trace of the model in `pack` to `path`; a context manager.

    With `has_requests` each `Supervisor.begin_request` begins one, and selections before the first
    are left out. Without, the text of a token is unknown: all count as one request, and the
    phase of several tokens in a call is unknown, unless at most one has an output, like a prompt's
    last.

    Written tokens stay, whatever ends the program. If writing fails, recording ends, and the
    context manager's end raises the error. Raises what a trace's `Writer` raises, and RequestError
    if something is at `path`.
    """

    def __init__(
        self, path: str | os.PathLike[str], pack: Pack, *, has_requests: bool = False
    ) -> None:
        if os.path.lexists(path):
            hint = "give `trace` the name of a new file"
            raise RequestError("exists already", path=path, hint=hint)
        unknown = frozenset(() if has_requests else (Unknown.REQUESTS,))
        self._origin = replace(origin_of(pack), unknown=unknown)
        self._last_layer = max(self._origin.expert_counts or (0,))
        self._has_requests = has_requests
        self._last_request = -1
        self._is_prompt = False
        """Whether the last request has had no output yet: a prompt ends with the first."""
        self._failure: MoepackError | None = None
        self.lost_count = 0
        """Selections that nobody read in time, so that the trace lacks them."""
        self.is_empty = True
        """Whether no token was routed yet: an empty trace is not kept."""
        self._path = os.fspath(path)
        self._writer = Writer(path)

    def write(self, calls: Sequence[tuple[int, Layers]], experts_used: int | None) -> None:
        """Write calls of the model, so that they outlive this process.

        Of each it gets how many requests had begun, and the experts of its tokens by layer. A token
        uses `experts_used`, which may be others than the model states.
        """
        try:
            if self._failure is None and calls:
                for request_count, layers in calls:
                    self._add(request_count - 1 if self._has_requests else 0, layers, experts_used)
                if not self.is_empty:
                    self._writer.keep()
        except MoepackError as error:
            self._failure = error

    def _add(self, request: int, layers: Layers, experts_used: int | None) -> None:
        if request < 0:
            return
        if self.is_empty:
            self._writer.add(replace(self._origin, experts_used=experts_used))
        if request != self._last_request:
            self._is_prompt = self._has_requests
        for tokens in tokens_of(layers, request, self._phase(layers)):
            self._writer.add(tokens)
        self._last_request, self.is_empty = request, False

    def _phase(self, layers: Layers) -> Phase:
        count = max(map(len, layers.values()))
        output_count = len(layers.get(self._last_layer, ()))
        was_prompt, self._is_prompt = self._is_prompt, self._is_prompt and not output_count
        if was_prompt or not output_count:
            return Phase.PREFILL
        if count == 1:
            return Phase.DECODE
        return Phase.PREFILL if self._has_requests or output_count == 1 else Phase.UNKNOWN

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        failure = self._failure
        if failure is None and not self.is_empty:
            self._writer.__exit__(None, None, None)
            if self.lost_count:
                text = f"{self._path}: {lost_text(self.lost_count)}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        # The part that was kept stays; a trace of nothing is none.
        self._writer.__exit__(RequestError, None, None)
        if failure is not None and exception[0] is None:
            raise failure


def lost_text(count: int) -> str:
    """Return what a trace lacks of which `count` selections were lost."""
    them = "selection of a layer is" if count == 1 else "selections of layers are"
    return f"{count:,} {them} missing: moepack was too busy to read them in time"


def origin_of(pack: Pack) -> Origin:
    """Return the origin of recordings of the model in `pack`."""
    shape, source = pack.shape.without_mtp(), pack.manifest.source
    return Origin(
        RECORDED,
        source.shards[0].name,
        model=source.name and source.name[:_MOST_NAME],
        expert_counts=shape.expert_counts,
        experts_used=shape.experts_used,
    )
