"""Prompts to measure with: real text, of as many tokens as are wanted."""

from __future__ import annotations

import pydoc_data.topics

from moepack.pager.pager import PagerOptions
from moepack.programs.command import single_text_options
from moepack.programs.model_server import ModelServer
from moepack.reading.pack import Pack

_MAX_TOKEN = 64
"""Characters of text that are looked at for each token that is wanted."""


def reference_text() -> str:
    """Return the Python reference as far as `help()` has it: 460,000 characters of prose and code.

    Repeated words would flatter whoever reads experts: their tokens choose the same ones.
    """
    return "\n\n".join(pydoc_data.topics.topics.values())


def beginning_of(text: str, count: int, pack: Pack) -> str:
    """Return the beginning of a text that has `count` tokens in a model's vocabulary, or all of it.

    Those that begin each text come on top. Raises what `ModelServer` and its client raise.
    """
    options = PagerOptions("floor", micro_batch=1)
    with ModelServer(pack, options, options=single_text_options(64, 1, 1)) as server:
        tokens = server.client.tokenize(text[: count * _MAX_TOKEN])
        return server.client.detokenize(tokens[:count])
