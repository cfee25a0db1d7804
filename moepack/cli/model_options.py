"""What commands that run a model ask: how it is held in memory and computed, and what it says."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click

from moepack.cli.parameters import Length, PathName
from moepack.llama_cpp.bounds import MAX_CONTEXT, MAX_THREADS

_Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_PAGER = (
    click.option(
        "--memory",
        type=Length(word="floor", share_of="memory"),
        metavar="SIZE",
        help="For experts: 8GiB, 50% of this machine's memory, or floor: what one step takes. By "
        "default what is free, as it changes.",
    ),
    click.option(
        "--policy",
        type=click.Choice(["lru", "lfu", "layer", "layer+lfu", "s3fifo", "least-stale"]),
        default="lru",
        show_default=True,
        help="Which experts are evicted.",
    ),
    click.option(
        "--pin",
        type=Length(share_of="experts"),
        metavar="SIZE",
        help="Keep the hottest experts: 2GiB, 10%; by default what was learned says.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "uring", "direct", "buffered"]),
        default="auto",
        show_default=True,
        help="How experts are read.",
    ),
    click.option(
        "--check",
        type=click.Choice(["always", "first", "never"]),
        default="first",
        show_default=True,
        help="When what was read is compared with its digest.",
    ),
    click.option(
        "--trace",
        "trace_path",
        type=PathName(),
        metavar="FILE",
        help="Record what routers choose, as far as it is computed.",
    ),
    click.option(
        "--no-learn",
        is_flag=True,
        help="Count no choices for the next run, and use no counts of earlier ones.",
    ),
)

threads_option = click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    help="Threads that compute.  [default: one for each core]",
)

_TEMPLATE = (
    click.option(
        "--chat-template",
        metavar="NAME_OR_TEXT",
        help="Template for chats, in place of the model's: one of llama.cpp's names, or Jinja.",
    ),
    click.option(
        "--chat-template-file",
        type=PathName(),
        metavar="FILE",
        help="File with a Jinja template for chats.",
    ),
)

_ENGINE = (
    *_PAGER,
    click.option(
        "-c",
        "--context",
        type=click.IntRange(0, MAX_CONTEXT),
        help="Tokens that the model looks back on; 0: what it was trained for.  "
        "[default: 4096, or that]",
    ),
    threads_option,
    click.option(
        "-ub",
        "--micro-batch",
        type=click.IntRange(1, MAX_CONTEXT),
        help="Tokens of a prompt computed at once; by default up to 2,048, as memory allows.",
    ),
)


_SAMPLING = (
    click.option(
        "--temperature",
        "--temp",
        type=float,
        default=0.8,
        show_default=True,
        help="Randomness of the text; 0 always takes the likeliest token.",
    ),
    click.option(
        "--top-k",
        type=int,
        default=40,
        show_default=True,
        help="Number of likeliest tokens to choose from.",
    ),
    click.option(
        "--top-p",
        type=float,
        default=0.95,
        show_default=True,
        help="Share of probability that tokens to choose from have together.",
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.05,
        show_default=True,
        help="Least probability of a token, as a share of the likeliest's.",
    ),
    click.option(
        "--repeat-penalty",
        type=float,
        default=1.0,
        show_default=True,
        help="Penalty for repeated tokens; 1 is none.",
    ),
    click.option(
        "-s", "--seed", type=int, help="Random seed, for the same text again.  [default: by chance]"
    ),
)


_PROMPT = (
    click.option(
        "--prompt",
        type=click.IntRange(1, 1 << 24),
        default=1000,
        show_default=True,
        metavar="N",
        help="Number of tokens of a prompt.",
    ),
    click.option(
        "-ub",
        "--micro-batch",
        type=click.IntRange(1, MAX_CONTEXT),
        metavar="N",
        help="Number of tokens of a prompt that are computed at once.  [default: what suits]",
    ),
)


def pager_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how experts are held in memory and read."""
    return _with(_PAGER, command)


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how messages are put before a model."""
    return _with(_TEMPLATE, command)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how a model is held in memory and computed."""
    return _with(_ENGINE, command)


def prompt_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which prompt is forecast, and how it is computed."""
    return _with(_PROMPT, command)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; it takes what they say as its argument `sampling`."""

    @wraps(command)
    def sampled(**given: Any) -> Any:
        from moepack.programs.sampling import Sampling, random_seed

        if given["seed"] in (None, -1):
            given["seed"] = random_seed()
        sampling = Sampling(**{name: given.pop(name) for name in Sampling._fields})
        sampling.check()
        return command(sampling=sampling, **given)

    return _with(_SAMPLING, sampled)


def _with(options: Sequence[_Option], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
