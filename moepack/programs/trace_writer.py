"""Keeps what routers chose while programs ran, as a trace: running is recording."""

from __future__ import annotations

import os
from dataclasses import replace
from types import TracebackType
from typing import Self

from moepack.errors import MoepackError, RequestError
from moepack.pager.pager import Pager
from moepack.pager.record import Call, Layers
from moepack.reading.pack import Pack
from moepack.trace.choices import tokens_of
from moepack.trace.file import RECORDED
from moepack.trace.file_writer import Writer
from moepack.trace.model import Origin, Phase, Unknown

_MOST_NAME = 1 << 10


class TraceWriter:
    """Writes a new trace of the model in `pack` to `path`; a context manager.

    With `has_requests` one begins wherever `Pager.begin_request` is called, and what was chosen
    before the first is left out. Without, nobody knows which text a token belongs to: all count as
    one request, and of several tokens in a call the phase is unknown, unless at most one has an
    output, as a prompt's last.

    What was written stays, whatever ends the program. Where it cannot be written, recording ends,
    and the error is raised when this is left. Raises what a trace's `Writer` raises, and
    RequestError where something is at `path`.
    """

    def __init__(
        self, path: str | os.PathLike[str], pack: Pack, *, has_requests: bool = False
    ) -> None:
        check_new(path)
        origin = origin_of_pack(pack)
        self._last_layer = max(origin.expert_counts or (0,))
        self._has_requests = has_requests
        self._last_request = -1
        self._failure: MoepackError | None = None
        self.is_empty = True
        """Whether no router has chosen anything yet: then there will be no trace."""
        self._writer = Writer(path)
        unknown = frozenset(() if has_requests else (Unknown.REQUESTS,))
        self._writer.add(replace(origin, unknown=unknown))

    def write(self, pager: Pager, *, is_last: bool = False) -> None:
        """Write what was chosen since the last time, so that it outlives this process.

        The last call of each context is held back until the next one begins, or it `is_last`.
        """
        calls = pager.take_calls(with_open=is_last)
        try:
            if self._failure is None and calls:
                for call in calls:
                    self._add(call)
                if not self.is_empty:
                    self._writer.keep()
        except MoepackError as error:
            self._failure = error

    def _add(self, call: Call) -> None:
        request = call.request_count - 1 if self._has_requests else 0
        if request < 0:
            return
        phase = self._phase(call.layers, self._has_requests and request != self._last_request)
        for tokens in tokens_of(call.layers, request, phase):
            self._writer.add(tokens)
        self._last_request, self.is_empty = request, False

    def _phase(self, layers: Layers, is_first: bool) -> Phase:
        count = max(map(len, layers.values()))
        output_count = len(layers.get(self._last_layer, ()))
        if is_first or not output_count:
            return Phase.PREFILL
        if count == 1:
            return Phase.DECODE
        return Phase.PREFILL if self._has_requests or output_count == 1 else Phase.UNKNOWN

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = self._failure
        if failure is None and not self.is_empty:
            self._writer.__exit__(None, None, None)
            return
        # What was kept stays; a trace of nothing is none.
        self._writer.__exit__(RequestError, None, None)
        if failure is not None and kind is None:
            raise failure


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise RequestError where something is at the path of a new trace."""
    if os.path.lexists(path):
        raise RequestError("exists already", path=path, hint="give `trace` the name of a new file")


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
