"""The memory that llama.cpp's server takes beside experts as it answers, and its limits.

Earlier texts are kept for prompts that begin like them. If another text takes the place of one, the
whole of it is kept, within `--cache-ram`, by default 8 GiB: the oldest go first, and one that is
longer is not kept at all. Each slot keeps copies of its windows and states too, up to
`--ctx-checkpoints`, by default 32, one or two for each prompt: they are 75 MiB of Qwen3-Next-80B,
200 of Gemma-4-26B (server-context.cpp and server-task.cpp of b11549, and tried).
"""

import os
from collections.abc import Sequence

from moepack.common.sizes import divide_up
from moepack.host.memory_limits import available_memory
from moepack.planning.footprint.context import MOEPACK_RUN
from moepack.planning.footprint.model import Footprint
from moepack.running.programs.command import CONTEXT, Option

_CACHE = Option(frozenset({"-cram", "--cache-ram"}), "LLAMA_ARG_CACHE_RAM")
_CHECKPOINTS = Option(
    frozenset({"-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"}), "LLAMA_ARG_CTX_CHECKPOINTS"
)
_SLOTS = Option(frozenset({"-np", "--parallel"}), "LLAMA_ARG_N_PARALLEL")
_DEFAULT_CACHE, _MOST_CHECKPOINTS, _DEFAULT_SLOTS = 8192, 32, 4
"""llama.cpp's defaults, the first in MiB."""
_LEAST_CHECKPOINTS = 2
"""With these the last prompt can be changed or answered again."""
_MIB = 1 << 20
_LEAST_CACHE = 64 * _MIB
_SHARE = 16
"""A sixteenth of the free memory is for whole texts at most, and another for checkpoints."""


def limit_earlier_texts(footprint: Footprint, command: Sequence[str]) -> list[str]:
    """Return options of llama-server that limit what it keeps of earlier texts.

    Those are left out that the command or a variable sets. The cache has space for texts that
    fill a context together, and so for a conversation while another prompt takes its place.
    """
    share = max(_LEAST_CACHE, available_memory() // _SHARE)
    whole, checkpoint = _lengths(footprint, command)
    count, words = _MOST_CHECKPOINTS, []
    if checkpoint and not _CHECKPOINTS.is_set(command, os.environ):
        fitting = share // (_slots(command) * checkpoint)
        count = min(_MOST_CHECKPOINTS, max(_LEAST_CHECKPOINTS, fitting))
        words = ["--ctx-checkpoints", str(count)]
    if not _CACHE.is_set(command, os.environ):
        length = min(share, max(_LEAST_CACHE, whole + count * checkpoint))
        words += ["--cache-ram", str(divide_up(length, _MIB))]
    return words


def beside_length(footprint: Footprint, command: Sequence[str]) -> int:
    """Return the bytes that a server takes at most beside experts and does not have at its start.

    These are the dense weights that each token reads, in the page cache, which counts as free, and
    earlier texts.
    """
    whole, checkpoint = _lengths(footprint, command)
    cache = _CACHE.integer(command, os.environ)
    if cache is None:
        cache = _DEFAULT_CACHE
    cached = cache * _MIB if cache >= 0 else whole  # without a limit it is one of tokens
    count = _CHECKPOINTS.integer(command, os.environ)
    count = _MOST_CHECKPOINTS if count is None else max(0, count)
    dense = footprint.weights.read_dense_length or 0
    return dense + cached + _slots(command) * count * checkpoint


def _lengths(footprint: Footprint, command: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of a text that fills the context, and of a checkpoint; 0 if unknown."""
    count = CONTEXT.number(command, os.environ)
    context = footprint.context(MOEPACK_RUN._replace(token_count=count))
    if context is None:
        return 0, 0
    return context.length, sum(layer.checkpoint_length for layer in context.layers)


def _slots(command: Sequence[str]) -> int:
    count = _SLOTS.integer(command, os.environ)
    return count if count is not None and count > 0 else _DEFAULT_SLOTS
