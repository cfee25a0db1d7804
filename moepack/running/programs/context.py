"""Context lengths: the one that is asked for, and the one that the model was trained for."""

from collections.abc import Callable

from moepack.common.errors import RequestError
from moepack.common.sizes import count_text
from moepack.pack.reading.pack import Pack

USUAL_CONTEXT = 4096
"""The default, of models that were trained for as much."""


def choose_context(
    pack: Pack, length: int | None, notice: Callable[[str], None] = lambda text: None
) -> int:
    """Return the tokens of a context: `length`, or those of the model's training for 0.

    None is the usual one, or that of the training if that is less. `notice` is called with a
    sentence about a context that is longer. Raises RequestError for 0 if the training is unknown.
    """
    trained = pack.manifest.source.context_length or None
    if length is None:
        return min(USUAL_CONTEXT, trained or USUAL_CONTEXT)
    if length == 0 and trained is None:
        problem = "the model does not state its trained context length"
        raise RequestError(problem, path=pack.path, hint="set it: `context=4096`")
    if trained is not None and length > trained:
        tokens = count_text(trained, "token")
        notice(f"the model was trained for {tokens} of context, and uses no more")
    return length or trained or USUAL_CONTEXT
