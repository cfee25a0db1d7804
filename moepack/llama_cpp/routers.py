"""The routers of a model that runs: which experts each layer's chose.

The eval callback (`cb_eval`) of llama.cpp shows each tensor of the graph; those that are named
`ffn_moe_topk-N` hold what the router of layer N chose for each token of the batch, before the
experts are used.
"""

import re
from functools import cache
from typing import Any

import numpy as np

from moepack.errors import MachineError
from moepack.llama_cpp import tensors
from moepack.llama_cpp.tensors import Matrices, Matrix

_PREFIX = b"ffn_moe_topk-"
_NAME = re.compile(r"ffn_moe_topk-(\d+)", re.ASCII)

Choice = Matrix
"""What a layer's router chose: experts, a row for each token."""


class Routers:
    """Takes from each graph what its routers chose, once of each layer.

    C cannot carry an exception, so the first is kept in `error`; the graph is left then.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._token_count = 0
        self._matrices = Matrices(library)
        self.chosen: dict[int, Choice] = {}
        """By layer, in the order in which the layers ran."""
        self.error: BaseException | None = None
        self.stopped = False
        self.callback = tensors.watch(_PREFIX, self._handle)

    def begin(self, token_count: int) -> None:
        """Expect a graph in which each layer chooses for so many tokens."""
        self.chosen, self.error, self.stopped = {}, None, False
        self._token_count = token_count
        self._matrices = Matrices(self._library)

    def stop(self) -> None:
        """Leave the graph at its next router."""
        self.stopped = True

    def _handle(self, tensor: int, asks: bool) -> bool:
        try:
            layer = _layer_of(tensors.name_of(tensor))
            if asks:
                return layer is not None
            if layer is not None:
                self._take(layer, self._matrices.read(tensor))
        except BaseException as error:
            self.error = self.error or error
        return not self.stopped and self.error is None

    def _take(self, layer: int, choice: Choice) -> None:
        if layer in self.chosen:
            self._check_same(layer, choice)
            return
        if choice.row_count != self._token_count:
            # llama.cpp leaves out what no output needs: the last layer would be counted too low.
            raise MachineError(
                "the router did not run for each token",
                place=f"layer {layer}",
                expected=f"{self._token_count} tokens",
                found=choice.row_count,
            )
        self.chosen[layer] = choice

    def _check_same(self, layer: int, choice: Choice) -> None:
        # Grovemoe lets a router choose once more, the same, for the experts that others share. For
        # another choice, or after another layer, what it needs may not be there.
        is_last = layer == next(reversed(self.chosen))
        first, again = self.chosen[layer].array(), choice.array()
        if not is_last or not np.array_equal(again, first[:, : again.shape[1]]):
            raise MachineError("the router chose twice in one step", place=f"layer {layer}")


@cache
def _layer_of(name: bytes) -> int | None:
    """Return the layer whose router a name names; None for a copy's, which has more to it."""
    match = _NAME.fullmatch(tensors.text_of(name))
    return None if match is None else int(match[1])
