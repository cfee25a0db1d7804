"""Options of llama.cpp's server by the model and the memory: context, batches, chat template.

Nearly all experts are read for a micro-batch, the tokens of a prompt that are computed at once.

The server keeps earlier texts for prompts that begin like them. If another text takes the place of
one, the whole of it is kept, within `--cache-ram`, by default 8 GiB: the oldest are evicted first,
and a longer one is not kept at all. Each slot keeps copies of its windows and states too, up to
`--ctx-checkpoints`, by default 32, one or two for each prompt: they are 75 MiB of Qwen3-Next-80B,
200 of Gemma-4-26B (server-context.cpp and server-task.cpp of b11549, and tried).
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moepack.common.errors import RequestError
from moepack.common.path_hints import missing_hint
from moepack.common.paths import AnyPath
from moepack.common.shape import ROUTED_FAMILY, ExpertKey
from moepack.common.sizes import Size, align, count_text, divide_up
from moepack.host.memory_limits import available_memory, memory_length
from moepack.pack.opening.open_model import read_first_header
from moepack.pack.reading.pack import Pack
from moepack.planning.footprint.context import MOEPACK_RUN
from moepack.planning.footprint.model import Footprint, footprint_of
from moepack.running.programs.command import (
    CONTEXT,
    Option,
    experts_used,
    says_micro_batch,
    single_text_options,
)
from moepack.running.serving.drafts import check_drafts, draft_model_length
from moepack.running.serving.llama_server_options import template_names
from moepack.running.streaming.budget import step_length

USUAL_CONTEXT = 4096
"""The default."""
MICRO_BATCHES = tuple(2048 >> shift for shift in range(12))
"""Candidates, the largest first: more than 2,048 tokens gain little on processors."""
_USUAL = 512
"""llama.cpp's default."""
_MOST_COMPUTING = 8
"""Above that default, computing may take an eighth of the memory."""
_CACHE = Option(frozenset({"-cram", "--cache-ram"}), "LLAMA_ARG_CACHE_RAM")
_CHECKPOINTS = Option(
    frozenset({"-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"}), "LLAMA_ARG_CTX_CHECKPOINTS"
)
_SLOTS = Option(frozenset({"-np", "--parallel"}), "LLAMA_ARG_N_PARALLEL")
_MOST_CHECKPOINTS, _DEFAULT_SLOTS = 32, 4
"""llama.cpp's defaults."""
_LEAST_CHECKPOINTS = 2
"""With these the last prompt can be changed or answered again."""
_MIB = 1 << 20
_LEAST_CACHE = 64 * _MIB
_SHARE = 16
"""A sixteenth of the free memory is for whole texts at most, and another for checkpoints."""
_TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_TEMPLATE = 1 << 20


def choose_context(
    pack: Pack, length: int | None, notice: Callable[[str], None] = lambda text: None
) -> int:
    """Return the tokens of a context: `length`, or for 0 the context of the model's training.

    None is `USUAL_CONTEXT`, or the training's if it is shorter. `notice` is called with a sentence
    about a context that is longer. Raises RequestError for 0 if the training's is unknown.
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


def server_options(
    pack: Pack, options: Sequence[str], memory: Size | None, pinned: Size
) -> tuple[list[str], int]:
    """Return options of llama-server, and the bytes that it takes beside experts at most.

    Limits of earlier texts and a micro-batch are among them if `options` and variables set none.
    `memory` is the bytes for experts, as in `StreamingOptions`, of which `pinned` stay.
    """
    footprint = footprint_of(pack)
    limits, beside = _beside_experts(pack, footprint, options)
    words = [*options, *limits]
    if not says_micro_batch(options):
        count = choose_micro_batch(pack, footprint, options, memory, pinned, beside)
        words += ["-ub", str(count)]
    return words, beside


def single_text_server(
    pack: Pack,
    options: Sequence[str],
    memory: Size | None,
    pinned: Size,
    *,
    context: int,
    threads: int | None,
    micro_batch: int | None,
) -> tuple[list[str], int]:
    """Return what `server_options` does, for one text at a time, before its other `options`.

    Without a `micro_batch` it is chosen by memory.
    """
    footprint = footprint_of(pack)
    few = [*single_text_options(context, threads, micro_batch or 1), *options]
    limits, beside = _beside_experts(pack, footprint, few)
    if micro_batch is None:
        micro_batch = choose_micro_batch(pack, footprint, few, memory, pinned, beside)
    return [*single_text_options(context, threads, micro_batch), *limits, *options], beside


def _beside_experts(
    pack: Pack, footprint: Footprint, command: Sequence[str]
) -> tuple[list[str], int]:
    """Return what `earlier_texts` does, with the bytes of a model that drafts.

    Raises RequestError if there would be no drafts.
    """
    check_drafts(pack, command)
    limits, length = earlier_texts(footprint, command)
    return limits, length + draft_model_length(command)


def choose_micro_batch(
    pack: Pack,
    footprint: Footprint,
    options: Sequence[str],
    memory: Size | None,
    pinned: Size,
    beside: int = 0,
) -> int:
    """Return the largest micro-batch that memory allows; `floor` is enough for one token.

    `beside` bytes of the free memory are not for experts.
    """
    available, limit = available_memory() - beside, memory_length(memory)
    if limit == "floor":
        return 1
    most = available if limit is None else limit
    used = experts_used(options, pack.manifest.source.architecture)
    for count in micro_batches(footprint, CONTEXT.number(options), available):
        if floor_length(pack, count, pinned, used) <= most:
            return count
    return 1


def micro_batches(footprint: Footprint, context: int | None, memory: int) -> Iterator[int]:
    """Yield micro-batches to try for a context of `context` tokens, the largest first.

    By default the context is that of the training. Above llama.cpp's default, computing must take
    no more than a fixed share of `memory` bytes.
    """
    for count in MICRO_BATCHES:
        if context is not None and count // 2 >= context:
            continue
        options = MOEPACK_RUN._replace(token_count=context, batch_count=count)
        computing = footprint.compute_length(options)
        if count <= _USUAL or (computing is not None and computing <= memory // _MOST_COMPUTING):
            yield count


def floor_length(
    pack: Pack, micro_batch: int, pinned: Size, experts_used: int | None = None
) -> int:
    """Return the bytes that experts need: for a step, for a token beside it, and for pins.

    A token uses `experts_used` in each layer, by default the model's own number.
    """
    shape = pack.shape.using(experts_used)
    lengths: dict[ExpertKey, int] = {}
    for layer, family in pack.shape.routed.items():  # whole pages, wherever a part begins in a page
        parts = pack.parts(layer)
        length = sum(align(part.length, mmap.PAGESIZE) + mmap.PAGESIZE for part in parts)
        lengths |= {ExpertKey(layer, expert): length for expert in range(family.expert_count)}
    options: Any = {"family": ROUTED_FAMILY, "layers": shape.without_mtp().routed}
    keys = pack.hottest(pack.budget_length(pinned, "pin", **options), **options)
    steps = step_length(shape, lengths, micro_batch) + step_length(shape, lengths, 1)
    return steps + sum(lengths[key] for key in keys)


def earlier_texts(footprint: Footprint, command: Sequence[str]) -> tuple[list[str], int]:
    """Return options that limit what a server keeps of earlier texts, and bytes beside experts.

    Options that the command or a variable sets are left out. The cache has space for texts that
    fill one context together: for a conversation while another prompt takes its place. The bytes
    are the most by which the server grows after its start: these texts, and the dense weights that
    each token reads, in the page cache, which counts as free.
    """
    share = max(_LEAST_CACHE, available_memory() // _SHARE)
    context = footprint.context(MOEPACK_RUN._replace(token_count=CONTEXT.number(command)))
    whole = context.length if context else 0
    checkpoint = sum(layer.checkpoint_length for layer in context.layers) if context else 0
    slots = _SLOTS.number(command) or _DEFAULT_SLOTS
    words: list[str] = []
    count = _CHECKPOINTS.integer(command)
    if count is None:
        count = _MOST_CHECKPOINTS
        if checkpoint:
            count = min(count, max(_LEAST_CHECKPOINTS, share // (slots * checkpoint)))
            words = ["--ctx-checkpoints", str(count)]
    kept = slots * max(0, count) * checkpoint
    cache = _CACHE.integer(command)
    if cache is None:
        length = min(share, max(_LEAST_CACHE, whole + max(0, count) * checkpoint))
        cache = divide_up(length, _MIB)
        words += ["--cache-ram", str(cache)]
    cached = cache * _MIB if cache >= 0 else whole  # without a limit it is one of tokens
    return words, (footprint.weights.read_dense_length or 0) + cached + kept


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
