"""The vocabulary of a loaded model: text to tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moepack.common.errors import RequestError

MAX_TEXT = 1 << 26
"""Most bytes of a text to tokenize: four for each token of the longest context."""
_MOST_ADDED = 8
"""Tokens beyond one for each byte: special ones at begin and end, and a prefix of the text."""


class Vocabulary:
    """The vocabulary of the model at `model`, as long as that is loaded; false without tokens."""

    def __init__(self, library: Any, model: int) -> None:
        self._library = library
        self._vocabulary = library.llama_model_get_vocab(model)

    def __bool__(self) -> bool:
        return bool(self._library.llama_vocab_type(self._vocabulary))

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with BOS if the vocabulary adds it. `<|…|>` may be one.

        Raises RequestError for more than MAX_TEXT bytes.
        """
        data = text.encode(errors="replace")
        if len(data) > MAX_TEXT:  # of gigabytes llama.cpp aborts
            expected = f"up to {MAX_TEXT:,} bytes"
            raise RequestError("a text that is too long", expected=expected, found=len(data))
        tokens = np.empty(len(data) + _MOST_ADDED, np.int32)
        for _ in range(2):  # the first call returns their number if there are more
            arguments = len(data), tokens.ctypes.data, len(tokens), True, True
            count = self._library.llama_tokenize(self._vocabulary, data, *arguments)
            tokens = np.empty(-count, np.int32) if count < 0 else tokens
        return [int(token) for token in tokens[: max(count, 0)]]

    def ends(self, token: int) -> bool:
        """Return whether a model ends its answer with this token."""
        return bool(self._library.llama_vocab_is_eog(self._vocabulary, token))

    def check(self, tokens: Sequence[int]) -> None:
        """Raise RequestError for an unknown token; llama.cpp would end the process."""
        count = self._library.llama_vocab_n_tokens(self._vocabulary)
        if min(tokens) < 0 or max(tokens) >= count:
            raise RequestError("a token that is not in the vocabulary")
