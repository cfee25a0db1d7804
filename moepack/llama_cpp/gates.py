"""What a router computes with: its weights, and what it is given."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moepack.llama_cpp.structs import OP_ADD, TYPE_F32, Tensor

_LOGITS = b"ffn_moe_logits-"
_MOST_STEPS = 16
"""From what a router chooses back to its logits: sorting, groups, biases, functions."""

Floats = NDArray[np.float32]


class Gate(NamedTuple):
    """The `weights` [expert, embedding] of a router, and what it is `given` [token, embedding].

    Some routers add `logit_bias` [expert] to their logits, others `score_bias` to the sigmoid of
    these. All are memory of llama.cpp: `given` for this node alone, the rest as long as the model.
    """

    weights: Floats
    given: Floats
    logit_bias: Floats | None
    score_bias: Floats | None

    def best(self, given: Floats, count: int) -> list[int]:
        """Return the experts that it would choose for one token, were it given this; unordered.

        That is without the rules for groups of experts that some models have.
        """
        scores = self.weights @ given
        if self.logit_bias is not None:
            scores += self.logit_bias
        if self.score_bias is not None:
            scores = 1 / (1 + np.exp(-scores)) + self.score_bias
        count = min(count, len(scores))
        best: list[int] = np.argpartition(scores, -count)[-count:].tolist()
        return best


def find_gate(library: Any, topk: int) -> Gate | None:
    """Find the gate of the router whose choice is the tensor at `topk`, while its graph runs.

    None where it is not of floats, or not in memory that this process can read. What it is given
    may be overwritten where nothing computes with it any more: some models choose in other ways
    than this knows, too. So a gate is for guessing.
    """
    tensor, logit_bias, score_bias = Tensor.from_address(topk), None, None
    for _ in range(_MOST_STEPS):
        first, second = tensor.src[0], tensor.src[1]
        if not first:
            break
        if tensor.name.startswith(_LOGITS):
            weights, given = _matrix(library, first), _matrix(library, second)
            if weights is None or given is None:
                break
            return Gate(weights, given, logit_bias, score_bias)
        bias = _matrix(library, second) if tensor.op == OP_ADD else None
        tensor = Tensor.from_address(first)
        if bias is not None and tensor.name.startswith(_LOGITS):
            logit_bias = bias[0]
        elif bias is not None:
            score_bias = bias[0]
    return None


def _matrix(library: Any, address: int | None) -> Floats | None:
    if not address:
        return None
    tensor = Tensor.from_address(address)
    (columns, rows, planes, volumes), (step, row_step, *_) = tensor.ne, tensor.nb
    if (tensor.type, planes, volumes, step, row_step) != (TYPE_F32, 1, 1, 4, 4 * columns):
        return None
    if not tensor.buffer or not library.ggml_backend_buffer_is_host(tensor.buffer):
        return None
    data = (ctypes.c_float * (columns * rows)).from_address(tensor.data)
    return np.frombuffer(data, np.float32).reshape(rows, columns)
