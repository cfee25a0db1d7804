"""Options of llama.cpp's server: those that memory decides, and the chat template."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.path_hints import missing_hint
from moepack.common.paths import AnyPath
from moepack.common.sizes import Size, count_text
from moepack.pack.opening.open_model import read_first_header
from moepack.pack.reading.pack import Pack
from moepack.running.programs.command import says_micro_batch, single_text_options
from moepack.running.serving.drafts import check_drafts
from moepack.running.serving.llama_server_options import template_names
from moepack.running.serving.served_model import ServedModel
from moepack.running.serving.server_memory import (
    NO_LIMITS,
    USUAL_CONTEXT,
    MemoryLimits,
    ServerMemory,
    sets_context,
    text_count,
)
from moepack.running.streaming.budget import MemoryParts

_TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_TEMPLATE = 1 << 20


class ServerPlan(NamedTuple):
    """Options of llama-server, and the memory of experts and of all beside them.

    `memory` is as in `StreamingOptions`.
    """

    words: list[str]
    memory: Size | None
    beside: MemoryParts


def checked_context(
    pack: Pack, length: int, notice: Callable[[str], None] = lambda text: None
) -> int:
    """Return the tokens of a context: `length`, or for 0 the context of the model's training.

    `notice` is called with a sentence about a context that is longer. Raises RequestError for 0 if
    the training's is unknown.
    """
    trained = pack.manifest.source.context_length or None
    if length == 0 and trained is None:
        problem = "the model does not state its trained context length"
        raise RequestError(problem, path=pack.path, hint="set it: `context=4096`")
    if trained is not None and length > trained:
        tokens = count_text(trained, "token")
        notice(f"the model was trained for {tokens} of context, and uses no more")
    return length or trained or USUAL_CONTEXT


def served_model(pack: Pack, name: str, context: int | None, command: Sequence[str]) -> ServedModel:
    """Return the facts of a model that a command of llama-server serves under a name."""
    shape = pack.shape.without_mtp()
    lengths: Counter[str] = Counter()
    for layer, family in shape.routed.items():
        for part in pack.parts(layer):
            lengths[part.type_name] += family.expert_count * part.length
    return ServedModel(
        name=name,
        quantisation=lengths.most_common(1)[0][0],
        length=sum(one.length for one in pack.dense()) + shape.expert_length,
        context=context,
        text_count=text_count(command),
    )


def server_options(
    pack: Pack, options: Sequence[str], limits: MemoryLimits = NO_LIMITS, aim: int = 0
) -> ServerPlan:
    """Return options of llama-server with those that `options` and variables leave open.

    Context, limits of earlier texts and a micro-batch are chosen by the memory; a context of `aim`
    tokens may take more of it. Raises RequestError for too little memory, and for drafts that there
    would not be.
    """
    check_drafts(pack, options)
    memory = ServerMemory(pack, limits)
    words = list(options)
    if not sets_context(words):
        words += ["-c", str(memory.context(words, aim))]
    words += memory.earlier_texts(words)[0]
    if not says_micro_batch(words):
        words += ["-ub", str(memory.micro_batch(words))]
    return ServerPlan(words, memory.experts(words), memory.parts(words))


def single_text_server(
    pack: Pack,
    options: Sequence[str],
    limits: MemoryLimits,
    *,
    context: int | None,
    threads: int | None,
    micro_batch: int | None,
) -> ServerPlan:
    """Return what `server_options` does, for one text at a time, before its other `options`.

    Without a `context` or a `micro_batch` they are chosen by memory.
    """
    check_drafts(pack, options)
    memory = ServerMemory(pack, limits)
    if context is None:
        context = memory.context([*single_text_options(0, threads, micro_batch or 1), *options])
    few = [*single_text_options(context, threads, micro_batch or 1), *options]
    kept = memory.earlier_texts(few)[0]
    micro_batch = micro_batch or memory.micro_batch([*few, *kept])
    words = [*single_text_options(context, threads, micro_batch), *kept, *options]
    return ServerPlan(words, memory.experts(words), memory.parts(words))


def has_chat_template(pack: Pack) -> bool:
    """Return whether a model has a chat template. Raises PackError if its header is damaged."""
    _, header = read_first_header(pack)
    return _TEMPLATE_KEY in header.pairs


def chat_template_options(name_or_text: str | None, path: AnyPath | None) -> list[str]:
    """Return options of llama-server for a template: one of its names, a Jinja text, or a file's.

    Raises RequestError for an unknown name, and a file that cannot be read.
    """
    if name_or_text is not None and path is not None:
        raise RequestError("`chat_template` and `chat_template_file` at once")
    text = name_or_text
    if path is not None:
        text = read_text(path, "chat template", _MAX_TEMPLATE)
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
