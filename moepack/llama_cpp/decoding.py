"""Decoding: a context goes on with a batch of tokens, and its routers are watched."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from moepack.errors import MachineError
from moepack.llama_cpp.calls import Calls
from moepack.llama_cpp.log import ErrorLines
from moepack.llama_cpp.routers import Choice, Routers
from moepack.llama_cpp.structs import Batch

Chosen = Mapping[int, Choice]
"""By layer, what its router chose for each token of a batch."""


def decode(
    library: Any,
    context: int,
    tokens: Sequence[int],
    errors: ErrorLines,
    *,
    path: str | os.PathLike[str],
    all_outputs: bool = False,
) -> None:
    """Go on with `tokens`, the model's from `path`; there are logits of the last one, or of all.

    Raises MachineError in llama.cpp's own words where it refuses.
    """
    ids = np.array(tokens, np.int32)
    outputs = np.full(len(ids), all_outputs, np.int8)
    outputs[-1] = True
    batch = Batch(len(ids), token=ids.ctypes.data, logits=outputs.ctypes.data)
    errors.clear()
    status = library.llama_decode(context, batch)
    if status != 0:
        raise MachineError(f"llama.cpp cannot decode (status {status}): {errors}", path=path)


class RoutedDecoder:
    """Decodes with the context at `context`, whose routers `routers` watch, in calls of `calls`.

    `path` is the model's, for messages. With `all_choices` each router runs for each token; without
    it the last layer computes only what is asked for.
    """

    def __init__(
        self,
        library: Any,
        context: int,
        errors: ErrorLines,
        calls: Calls,
        routers: Routers,
        *,
        path: str | os.PathLike[str],
        all_choices: bool,
    ) -> None:
        self._library = library
        self._context = context
        self._errors = errors
        self._calls = calls
        self._routers = routers
        self._path = path
        self._all_choices = all_choices

    def decode(self, tokens: Sequence[int], layers: Collection[int]) -> Chosen:
        """Go on with `tokens`; return what the routers of `layers`, which must be all, chose.

        Without layers no router is watched: llama.cpp computes a little faster, and an interruption
        comes up when it has computed all tokens.
        Raises what the routers' watcher raised; else MachineError where llama.cpp refuses, and
        where other layers chose.
        """
        routers = self._routers
        token_count = len(tokens) if self._all_choices else None
        routers.begin(token_count, watches=bool(layers))
        try:
            self._calls.run(lambda: self._decode(tokens))
        except MachineError:
            if routers.error is None:
                raise
        if routers.error is not None:  # also where llama.cpp has not noticed that it was stopped
            raise routers.error
        if routers.chosen.keys() != set(layers):
            problem = "llama.cpp ran the routers of other layers"
            expected, found = sorted(layers), sorted(routers.chosen)
            raise MachineError(problem, path=self._path, expected=expected, found=found)
        return routers.chosen

    def _decode(self, tokens: Sequence[int]) -> None:
        decode(
            *(self._library, self._context, tokens, self._errors),
            path=self._path,
            all_outputs=self._all_choices,
        )
