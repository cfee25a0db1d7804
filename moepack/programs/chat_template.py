"""Templates for chats: the model's own, or another. llama.cpp's server would take some other."""

from __future__ import annotations

from moepack.engines.source_header import first_header
from moepack.errors import RequestError
from moepack.escaping import shell_word
from moepack.paths import AnyPath
from moepack.programs.llama_server_options import template_names
from moepack.reading.pack import Pack

_KEY = "tokenizer.chat_template"
_MAX_LENGTH = 1 << 20


def has_chat_template(pack: Pack) -> bool:
    """Return whether a model brings a template for chats. Raises PackError as `first_header`."""
    _, header = first_header(pack)
    return _KEY in header.pairs


def no_chats(pack: Pack) -> RequestError:
    """Return the error for a model without a template for chats."""
    run = f"moepack run {shell_word(str(pack.path))}"
    return RequestError(
        "the model has no template for chats",
        path=pack.path,
        hint=f"give it one: `{run} --chat-template chatml`; or a text to go on with: "
        f"`{run} --raw -p TEXT`",
    )


def chat_template_options(name_or_text: str | None, path: AnyPath | None) -> list[str]:
    """Return options of llama-server for a template: one of its names, a Jinja text, or a file's.

    None without any. Raises RequestError for a name that is none, and a file that cannot be read.
    """
    if name_or_text is not None and path is not None:
        raise RequestError("`chat_template` and `chat_template_file` at once")
    text = name_or_text if path is None else _read(path)
    if text is None:
        return []
    if path is not None or "{" in text:
        return ["--jinja", "--chat-template", text]
    names = template_names()
    if text not in names:
        hint = f"a Jinja text, or one of {', '.join(names)}"
        raise RequestError("llama.cpp has no chat template of that name", found=text, hint=hint)
    # To its Jinja a name would be a template, which makes the same text of all messages.
    return ["--no-jinja", "--chat-template", text]


def _read(path: AnyPath) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_LENGTH + 1)
    except OSError as error:
        problem = f"cannot read the chat template: {error.strerror}"
        raise RequestError(problem, path=path) from None
    if len(text) > _MAX_LENGTH or not text.strip():
        problem = (
            "the chat template is empty" if len(text) <= _MAX_LENGTH else "too long a template"
        )
        raise RequestError(problem, path=path)
    return text
