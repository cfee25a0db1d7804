"""A model as it is served, and how its server is watched."""

import json
import os
from typing import Literal, NamedTuple, Self

LogFormat = Literal["text", "json"]
_VARIABLE = "MOEPACK_WATCHED"


class ServedModel(NamedTuple):
    """The name, the type of most bytes of experts, and the bytes of all tensors.

    Up to `text_count` texts are computed at once, within `context` tokens. Unknown facts are None.
    """

    name: str = ""
    quantisation: str | None = None
    length: int | None = None
    context: int | None = None
    text_count: int | None = None


class Watched(NamedTuple):
    """How a server is watched: with a log of requests, and with a `model` by `moepack ps`."""

    log: LogFormat | None = None
    model: ServedModel | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a server that is watched so."""
        model = None if self.model is None else self.model._asdict()
        return {_VARIABLE: json.dumps({"log": self.log, "model": model})}

    @classmethod
    def here(cls) -> Self:
        """Return how this process, a server, is watched."""
        facts = json.loads(os.environ.get(_VARIABLE, "{}"))
        model = facts.get("model")
        return cls(facts.get("log"), None if model is None else ServedModel(**model))
