"""Chats: messages to a prompt, by the template that a model brings with it.

Templates are Jinja, as transformers runs them; they come from a file of somebody else's, so they
run in a sandbox that lets them change nothing.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, NoReturn

from moepack import extras
from moepack.errors import MachineError, RequestError, SourceError


class Message(NamedTuple):
    """What somebody said; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


class ChatTemplate:
    """A template, and the texts of the tokens that it may name.

    Raises MachineError where Jinja is missing, SourceError for a template that is none. `path` is
    for messages.
    """

    def __init__(self, text: str, path: str, bos: str = "", eos: str = "") -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            problem = "jinja2 is not installed, which chats need"
            raise MachineError(problem, hint=extras.hint("run")) from None
        self._path = path
        self._names: dict[str, Any] = {"bos_token": bos, "eos_token": eos}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise SourceError(f"its chat template is broken: {error}", path=path) from None

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of the chat so far, up to where the assistant answers.

        Raises RequestError for messages that the template refuses.
        """
        listed = [message._asdict() for message in messages]
        try:
            return str(
                self._template.render(messages=listed, add_generation_prompt=True, **self._names)
            )
        except Exception as error:  # it is somebody's program, and may raise anything
            problem = f"the model's chat template refuses the messages: {error}"
            raise RequestError(problem, path=self._path) from None


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
