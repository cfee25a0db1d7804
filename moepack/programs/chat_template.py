"""Whether a model can chat: llama.cpp's server takes a template of its own where it brings none."""

from moepack.engines.source_header import first_header
from moepack.errors import RequestError
from moepack.reading.pack import Pack

_KEY = "tokenizer.chat_template"


def has_chat_template(pack: Pack) -> bool:
    """Return whether a model brings a template for chats. Raises PackError as `first_header`."""
    _, header = first_header(pack)
    return _KEY in header.pairs


def check_chats(pack: Pack) -> None:
    """Raise RequestError for a model without a template for chats."""
    if not has_chat_template(pack):
        raise RequestError(
            "the model has no template for chats",
            path=pack.path,
            hint="give it a text to go on with: `moepack run MODEL --raw -p TEXT`",
        )
