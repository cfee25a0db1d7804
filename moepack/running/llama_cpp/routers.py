"""The routers of a model that runs: the experts that each layer's selects.

The eval callback (`cb_eval`) of llama.cpp shows each tensor of the graph; those that are named
`ffn_moe_topk-N` have the selection of layer N's router for each token of the batch, before the
experts are used.
"""

import re
from functools import cache
from typing import Any

import numpy as np

from moepack.common.errors import MachineError
from moepack.running.llama_cpp import tensors
from moepack.running.llama_cpp.tensors import Matrices, Matrix

_PREFIX = b"ffn_moe_topk-"
_NAME = re.compile(r"ffn_moe_topk-(\d+)", re.ASCII)


class Routers:
    """Reads the selections of all routers from each graph, once of each layer.

    C cannot carry an exception, so the first is kept in `error`; the graph is left then.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._token_count = 0
        self._matrices = Matrices(library)
        self.selections: dict[int, Matrix] = {}
        """By layer, in the order in which they ran: experts, a row for each token."""
        self.error: BaseException | None = None
        self.stopped = False
        self.callback = tensors.watch(_PREFIX, self._handle)

    def begin(self, token_count: int) -> None:
        """Expect a graph in which each layer routes `token_count` tokens."""
        self.selections, self.error, self.stopped = {}, None, False
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
                self._add(layer, self._matrices.read(tensor))
        except BaseException as error:
            self.error = self.error or error
        return not self.stopped and self.error is None

    def _add(self, layer: int, selection: Matrix) -> None:
        if layer in self.selections:
            self._check_same(layer, selection)
            return
        if selection.row_count != self._token_count:
            # llama.cpp leaves out tokens that no output needs: the last layer's counts would lack
            # them.
            raise MachineError(
                "the router did not run for each token",
                place=f"layer {layer}",
                expected=f"{self._token_count} tokens",
                found=selection.row_count,
            )
        self.selections[layer] = selection

    def _check_same(self, layer: int, selection: Matrix) -> None:
        # Grovemoe's router selects once more, the same, for the experts that others share. For
        # another selection, or after another layer, the experts may not be there.
        is_last = layer == next(reversed(self.selections))
        first, again = self.selections[layer].array(), selection.array()
        if not is_last or not np.array_equal(again, first[:, : again.shape[1]]):
            raise MachineError("the router selected twice in one step", place=f"layer {layer}")


@cache
def _layer_of(name: bytes) -> int | None:
    """Return the layer in a router's name; None for a copy's, which has more to it."""
    match = _NAME.fullmatch(tensors.text_of(name))
    return None if match is None else int(match[1])
