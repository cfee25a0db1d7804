"""How many tokens a model looks back on: what is asked for, and what it was trained for."""

from __future__ import annotations

from typing import NamedTuple

from moepack.errors import RequestError
from moepack.reading.pack import Pack

USUAL_CONTEXT = 4096
"""The default, of models that were trained for as much."""


class Context(NamedTuple):
    """Tokens of context; `trained` are those that the model was trained for, None for unknown."""

    length: int
    trained: int | None

    @property
    def is_beyond_training(self) -> bool:
        """Whether it is more than the model was trained for."""
        return self.trained is not None and self.length > self.trained


def choose_context(pack: Pack, length: int | None) -> Context:
    """Return the context of `length` tokens, 0 for what the model was trained for.

    None is the usual one, or what the model was trained for if that is less. Raises RequestError
    for 0 where nobody knows that.
    """
    trained = pack.manifest.source.context_length or None
    if length is None:
        return Context(min(USUAL_CONTEXT, trained or USUAL_CONTEXT), trained)
    if length == 0 and trained is None:
        problem = "the model does not say for how long a context it was trained"
        raise RequestError(problem, path=pack.path, hint="say how many tokens: `context=4096`")
    return Context(length or trained or USUAL_CONTEXT, trained)
