"""Context lengths: the one that is asked for, and the one that the model was trained for."""

from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.pack.reading.pack import Pack

USUAL_CONTEXT = 4096
"""The default, of models that were trained for as much."""


class ContextLength(NamedTuple):
    """Tokens of a context; `trained` are those in the model's training, None if unknown."""

    length: int
    trained: int | None

    @property
    def is_beyond_training(self) -> bool:
        """Whether it is more than the model was trained for."""
        return self.trained is not None and self.length > self.trained


def choose_context(pack: Pack, length: int | None) -> ContextLength:
    """Return the context of `length` tokens, 0 for the length of the model's training.

    None is the usual one, or that of the training if that is less. Raises RequestError for 0 if
    that is unknown.
    """
    trained = pack.manifest.source.context_length or None
    if length is None:
        return ContextLength(min(USUAL_CONTEXT, trained or USUAL_CONTEXT), trained)
    if length == 0 and trained is None:
        problem = "the model does not state its trained context length"
        raise RequestError(problem, path=pack.path, hint="set it: `context=4096`")
    return ContextLength(length or trained or USUAL_CONTEXT, trained)
