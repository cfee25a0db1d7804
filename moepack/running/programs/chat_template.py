"""Templates for chats: the model's own, or another one that options name."""

import os

from moepack.common.errors import RequestError
from moepack.common.escaping import shell_word
from moepack.common.path_hints import missing_hint
from moepack.common.paths import AnyPath
from moepack.pack.opening.source_header import read_first_header
from moepack.pack.reading.pack import Pack
from moepack.running.programs.llama_server_options import template_names

_KEY = "tokenizer.chat_template"
_MAX_LENGTH = 1 << 20


def has_chat_template(pack: Pack) -> bool:
    """Return whether a model has a chat template. Raises PackError if its header is damaged."""
    _, header = read_first_header(pack)
    return _KEY in header.pairs


def no_chats(pack: Pack) -> RequestError:
    """Return the error for a model without a template for chats."""
    run = f"moepack run {shell_word(str(pack.path))}"
    return RequestError(
        "the model has no template for chats",
        path=pack.path,
        hint=f"give it one: `{run} --chat-template chatml`",
    )


def chat_template_options(name_or_text: str | None, path: AnyPath | None) -> list[str]:
    """Return options of llama-server for a template: one of its names, a Jinja text, or a file's.

    Raises RequestError for an unknown name, and a file that cannot be read.
    """
    if name_or_text is not None and path is not None:
        raise RequestError("`chat_template` and `chat_template_file` at once")
    text = name_or_text
    if path is not None:
        text = read_text(path, "chat template", _MAX_LENGTH)
        if not text.strip():
            raise RequestError("the chat template is empty", path=path)
    if text is None:
        return []
    if path is not None or "{" in text:
        return ["--jinja", "--chat-template", text]
    names = template_names()
    if text not in names:
        hint = f"a Jinja text, or one of {', '.join(names)}"
        raise RequestError("llama.cpp has no chat template of that name", found=text, hint=hint)
    return ["--chat-template", text]


def read_text(path: AnyPath, name: str, most: int) -> str:
    """Return the text in a file, of at most `most` characters; `name` is for messages.

    Raises RequestError for a file that cannot be read, or is too long.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(most + 1)
    except OSError as error:
        hint = missing_hint(os.fspath(path)) if isinstance(error, FileNotFoundError) else None
        problem = f"cannot read the {name}: {error.strerror}"
        raise RequestError(problem, path=path, hint=hint) from None
    if len(text) > most:
        expected = f"up to {most:,} characters"
        raise RequestError(f"the {name} is too long", path=path, expected=expected)
    return text
