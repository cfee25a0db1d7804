"""What a context keeps of its sequence, and going back in it.

Layers with a window keep the tokens of that window alone, and states only what they have become. To
go back further than what is kept takes a checkpoint: a copy of windows and states at one place of
the sequence, which all other layers keep anyway.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_SEQUENCE = 0
_PARTIAL_ONLY = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: without what is kept of all tokens."""


class _Checkpoint(NamedTuple):
    """A copy of what was kept of the first `token_count` tokens, and not for good."""

    token_count: int
    data: ctypes.Array[ctypes.c_char]


class History:
    """The sequence in the memory of a context, both of llama.cpp; `window` is its model's."""

    def __init__(self, library: Any, context: int, memory: int, window: int) -> None:
        self._library = library
        self._context = context
        self._memory = memory
        self._window = window
        self._checkpoint: _Checkpoint | None = None

    def save(self, count: int) -> None:
        """Keep a checkpoint of the sequence, which has `count` tokens, instead of the last one."""
        self._checkpoint = None  # two of them have no room
        library, context = self._library, self._context
        length = library.llama_state_seq_get_size_ext(context, _SEQUENCE, _PARTIAL_ONLY)
        data = ctypes.create_string_buffer(length)
        written = library.llama_state_seq_get_data_ext(
            context, data, length, _SEQUENCE, _PARTIAL_ONLY
        )
        if written == length:
            self._checkpoint = _Checkpoint(count, data)

    def go_back(self, count: int) -> int:
        """Forget all but the first `count` tokens; return how many are left.

        They are fewer where what `count` tokens look back on is not kept: then those of the
        checkpoint, or none.
        """
        kept = count if self._cut(count) else self._restore(count)
        if self._checkpoint is not None and kept < self._checkpoint.token_count:
            self._checkpoint = None  # other tokens come there
        return kept

    def _cut(self, count: int) -> bool:
        """Forget the tokens behind the first `count`, if what these look back on is there."""
        library, memory = self._library, self._memory
        if library.llama_memory_seq_pos_max(memory, _SEQUENCE) < count:
            return True
        # llama.cpp itself does not look: it would go on with a hole in the window.
        oldest = library.llama_memory_seq_pos_min(memory, _SEQUENCE)
        if count and oldest > max(0, count + 1 - self._window):
            return False
        return bool(library.llama_memory_seq_rm(memory, _SEQUENCE, count, -1))

    def _restore(self, count: int) -> int:
        """Go back to the checkpoint, or to the token ahead of it; else forget all."""
        library, memory, checkpoint = self._library, self._memory, self._checkpoint
        if checkpoint is not None and count >= checkpoint.token_count - 1:
            length = len(checkpoint.data)
            arguments = (self._context, checkpoint.data, length, _SEQUENCE, _PARTIAL_ONLY)
            if library.llama_state_seq_set_data_ext(*arguments) == length and (
                library.llama_memory_seq_rm(memory, _SEQUENCE, checkpoint.token_count, -1)
            ):
                kept = min(count, checkpoint.token_count)
                if self._cut(kept):
                    return kept
        library.llama_memory_clear(memory, True)
        return 0
