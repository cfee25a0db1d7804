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


class RoutedDecoder:
    """Decodes with the context at `context`, whose routers `routers` watch, in calls of `calls`.

    `path` is the model's, for messages.
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
    ) -> None:
        self._library = library
        self._context = context
        self._errors = errors
        self._calls = calls
        self._routers = routers
        self._path = path

    def decode(self, tokens: Sequence[int], layers: Collection[int]) -> Chosen:
        """Go on with `tokens`; return what the routers of `layers`, which must be all, chose.

        Raises what the routers' watcher raised; else MachineError where llama.cpp refuses, and
        where other layers chose.
        """
        routers = self._routers
        routers.begin(len(tokens))
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
        ids = np.array(tokens, np.int32)
        # The last layer computes only tokens whose output is asked for.
        outputs = np.ones(len(ids), np.int8)
        batch = Batch(len(ids), token=ids.ctypes.data, logits=outputs.ctypes.data)
        self._errors.clear()
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            problem = f"llama.cpp cannot decode (status {status}): {self._errors}"
            raise MachineError(problem, path=self._path)
