"""Options of commands that run a model."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from moepack.cli.shared.options import micro_batch_option, number_option, options, size_option
from moepack.cli.shared.parameters import PathName
from moepack.running.serving.sampling import MAX_CONTEXT, MAX_THREADS
from moepack.traces.caching.cache import DEFAULT_POLICY, POLICIES

streaming_options = options(
    size_option(
        "--memory",
        word="floor",
        share_of="memory",
        help="Memory for experts: 8GiB, 50% of this machine's memory, or floor, the minimum "
        "for one step.  [default: the free memory, as it changes]",
    ),
    size_option(
        "--total-memory",
        share_of="memory",
        help="Memory for all together, in place of --memory: experts get what the rest leaves.",
    ),
    click.option(
        "--policy",
        type=click.Choice(POLICIES),
        default=DEFAULT_POLICY,
        help="Cache eviction policy.",
    ),
    size_option(
        "--pin",
        share_of="experts",
        help="Amount of the hottest experts to pin: 2GiB, 10%.  [default: none]",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "uring", "direct", "buffered"]),
        default="auto",
        help="Method for reading experts from the drive.",
    ),
    click.option(
        "--check",
        type=click.Choice(["always", "first", "never"]),
        default="first",
        help="Reads to verify by their digests: all, or the first of each part and few later ones.",
    ),
    click.option(
        "--no-prefetch",
        "prefetch",
        is_flag=True,
        flag_value=False,
        default=True,
        show_default=False,
        help="Do not read what the next layer's router names while a layer is computed.",
    ),
    click.option(
        "--trace",
        "trace_path",
        type=PathName(),
        metavar="FILE",
        help="Trace file to record the routing to.",
    ),
    click.option(
        "--no-learn",
        is_flag=True,
        help="Keep no counts for later runs, and ignore those of earlier ones.",
    ),
)

context_option = number_option(
    "-c",
    "--context",
    "--ctx-size",
    least=0,
    most=MAX_CONTEXT,
    help="Context length in tokens; 0 is the trained length.  [default: that, within an eighth of "
    "the memory]",
)
threads_option = number_option(
    "-t",
    "--threads",
    least=1,
    most=MAX_THREADS,
    help="Number of computing threads.  [default: one per core]",
)
server_option = click.option(
    "--server",
    "server_program",
    metavar="PROGRAM",
    help="A llama-server of your own, such as one for a GPU, in place of moepack's.",
)
stats_option = click.option(
    "--stats", is_flag=True, help="Print speed, hit rate and reads while it runs."
)

chat_options = options(
    click.option(
        "--chat-template",
        metavar="NAME_OR_TEXT",
        help="Chat template in place of the model's: one of llama.cpp's names, or Jinja.",
    ),
    click.option(
        "--chat-template-file",
        type=PathName(),
        metavar="FILE",
        help="Chat template in a Jinja file.",
    ),
)

engine_options = options(
    streaming_options,
    context_option,
    threads_option,
    server_option,
    micro_batch_option("Prompt tokens computed at once; by default up to 2,048, as memory allows."),
)

_sampling_options = options(
    click.option(
        "--temperature",
        "--temp",
        type=float,
        default=0.8,
        help="Sampling temperature; 0 is greedy.",
    ),
    click.option(
        "--top-k", type=int, default=40, help="Number of most likely tokens to sample from."
    ),
    click.option(
        "--top-p",
        type=float,
        default=0.95,
        help="Nucleus sampling: cumulative probability of the tokens to sample from.",
    ),
    click.option(
        "--min-p",
        type=float,
        default=0.05,
        help="Minimum probability of a token, relative to the most likely one.",
    ),
    click.option(
        "--repeat-penalty", type=float, default=1.0, help="Penalty for repeated tokens; 1 is none."
    ),
    click.option("-s", "--seed", type=int, help="Random seed; -1 draws one.  [default: -1]"),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling options to a command, which has them as its argument `sampling`."""

    @wraps(command)
    def sampled(**arguments: Any) -> Any:
        from moepack.running.serving.sampling import Sampling, random_seed

        if arguments["seed"] in (None, -1):
            arguments["seed"] = random_seed()
        sampling = Sampling(**{name: arguments.pop(name) for name in Sampling._fields})
        sampling.check()
        return command(sampling=sampling, **arguments)

    decorated: Callable[..., Any] = _sampling_options(sampled)
    return decorated
