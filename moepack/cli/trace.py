"""The commands `trace …` and `hotness`: what was measured of routing, and what it says."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import moepack
from moepack.cli.terminal import json_option, progress, show
from moepack.errors import RequestError
from moepack.storage.atomic import write_whole

if TYPE_CHECKING:
    from moepack.trace.validation import Shape

_format_option = click.option(
    "--format", "form", metavar="NAME", help="What the files are, whatever their content says."
)
_lenient_option = click.option(
    "--lenient", is_flag=True, help="Leave out and count what is wrong, instead of stopping."
)
_model_option = click.option(
    "--model", "model_path", metavar="SOURCE", help="Refuse what this model cannot have routed."
)
_pack_option = click.option("--pack", "pack_path", metavar="PACK", help="The same, of a pack.")
_output_option = click.option("-o", "--output", required=True, metavar="FILE")
_files_argument = click.argument("paths", nargs=-1, required=True, metavar="FILE...")


@click.group()
def trace() -> None:
    """Read, record and judge traces of which experts a model chose."""


@trace.command("import")
@_files_argument
@_output_option
@click.option("--append", is_flag=True, help="Add to a trace file that is there.")
@_format_option
@_lenient_option
@_model_option
@json_option
def import_(
    paths: tuple[str, ...],
    output: str,
    append: bool,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    as_json: bool,
) -> None:
    """Turn traces of any format into one trace file.

    Example: moepack trace import server.log -o chat.moetrace
    """
    from moepack.hotness import counter, measure
    from moepack.report import trace_text
    from moepack.trace import file

    _refuse_existing(output, append)
    options = measure.Options(form, _shape(_experts_of(model_path, None)), lenient)
    warnings: Counter[str] = Counter()
    counted = counter.Tally()
    with file.Writer(output, append=append) as writer:
        for item in measure.read(paths, options, warnings):
            writer.add(item)
            counted.add(item)
    facts = {
        "path": output,
        "token_count": counted.token_count,
        "request_count": counted.request_count,
        "selection_count": counted.selection_count - counted.loose_count,
        "counted_selection_count": counted.loose_count,
        "unknown": sorted(counted.unknown),
        "origins": [origin.to_json() for origin in counted.origins],
        "warnings": warnings,
    }
    show(facts, as_json, trace_text.imported)


@trace.command()
@_files_argument
@click.option(
    "--window", type=click.IntRange(1), default=128, show_default=True, help="Tokens in a window."
)
@_format_option
@_lenient_option
@_model_option
@_pack_option
@json_option
def stats(
    paths: tuple[str, ...],
    window: int,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    pack_path: str | None,
    as_json: bool,
) -> None:
    """Print the working set of traces: how many experts a window of tokens needs, how many are new.

    Example: moepack trace stats chat.moetrace --pack model.moepack
    """
    from moepack.analysis import reuse, working_set
    from moepack.hotness import measure
    from moepack.report import trace_text

    model = _experts_of(model_path, pack_path)
    options, lengths = measure.Options(form, _shape(model), lenient), _lengths(model)
    warnings: Counter[str] = Counter()
    found, again = working_set.WorkingSet(window, lengths), reuse.Reuse()
    for item in measure.read(paths, options, warnings):
        found.add(item)
        again.add(item)
    facts = {
        "window": window,
        "window_count": found.window_count,
        "request_count": found.request_count,
        "has_lengths": lengths is not None,
        "working_set": [row._asdict() for row in found.rows()],
        "reuse": again.to_json(),
        "warnings": warnings,
    }
    show(facts, as_json, trace_text.stats)


@trace.command()
@_files_argument
@click.option("--plot", "plot_path", metavar="FILE", help="Draw heat and coverage: SVG or PNG.")
@_format_option
@_lenient_option
@_model_option
@_pack_option
@json_option
def concentration(
    paths: tuple[str, ...],
    plot_path: str | None,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    pack_path: str | None,
    as_json: bool,
) -> None:
    """Judge whether some experts are chosen so much more that it is worth pinning them.

    Example: moepack trace concentration chat.moetrace
    """
    from moepack.analysis import concentration
    from moepack.hotness import measure
    from moepack.report import chart, trace_text

    if plot_path:
        chart.check(plot_path)
    shape = _shape(_experts_of(model_path, pack_path))
    warnings: Counter[str] = Counter()
    options = measure.Options(form, shape, lenient)
    counted = concentration.count(measure.read(paths, options, warnings))
    found = concentration.measure(*counted, shape)
    if plot_path:
        heat, curves = concentration.heat_table(counted[0]), concentration.curves(*counted)
        chart.heat(heat, curves, ", ".join(paths), plot_path)
    facts = found.to_json() | {"warnings": warnings}
    show(facts, as_json, trace_text.concentration)


@trace.command()
@click.option("--model", "model_path", required=True, metavar="SHARD", help="The first shard.")
@click.option(
    "--prompts", "prompts_path", required=True, metavar="FILE", help="One a line: text, or JSON."
)
@_output_option
@click.option("--append", is_flag=True, help="Add to a trace file that is there.")
@click.option(
    "--tokens",
    "count",
    type=click.IntRange(0),
    default=128,
    show_default=True,
    help="To generate for each prompt.",
)
@click.option(
    "--context", type=click.IntRange(1), default=4096, show_default=True, help="Tokens at most."
)
@click.option(
    "--temperature", type=click.FloatRange(0, 10), default=0.8, show_default=True, help="0: greedy."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(1, 512), help="Of llama.cpp; by default one a CPU.")
@json_option
def record(
    model_path: str,
    prompts_path: str,
    output: str,
    append: bool,
    count: int,
    context: int,
    temperature: float,
    seed: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run llama.cpp on prompts and record what the router chooses.

    Interrupted, it keeps the prompts that were finished.

    Example: moepack trace record --model model-00001-of-00004.gguf --prompts p.txt -o chat.moetrace
    """
    from moepack.report import trace_text
    from moepack.trace import file
    from moepack.trace.recording import prompts, recorder

    _refuse_existing(output, append)
    asked = prompts.read(prompts_path)
    shown = progress(len(asked), "recording", "")
    with file.Writer(output, append=append) as writer, shown as advanced:
        summary = recorder.record(
            *(model_path, asked, writer),
            count=count, context_length=context, temperature=temperature, seed=seed,
            threads=threads, progress=advanced,
        )  # fmt: skip
    facts = {
        "path": output,
        "token_count": summary.token_count,
        "request_count": summary.request_count,
        "selection_count": summary.selection_count,
        "counted_selection_count": 0,
        "unknown": [],
        "origins": [summary.origin.to_json()],
        "warnings": {},
    }
    show(facts, as_json, trace_text.imported)


@click.command()
@_files_argument
@_output_option
@click.option("--weights", "weight_text", metavar="LIST", help="What each file counts: 2,1,0.5.")
@click.option(
    "--phases",
    type=click.Choice(["all", "decode"]),
    default="all",
    show_default=True,
    help="Count all tokens, or leave prefill out.",
)
@_format_option
@_lenient_option
@_model_option
@_pack_option
@json_option
def hotness(
    paths: tuple[str, ...],
    output: str,
    weight_text: str | None,
    phases: str,
    form: str | None,
    lenient: bool,
    model_path: str | None,
    pack_path: str | None,
    as_json: bool,
) -> None:
    """Count how often each expert was chosen, in traces, imatrices and hotness files together.

    Example: moepack hotness chat.moetrace imatrix.gguf --weights 3,1 -o hot.csv
    """
    from moepack.hotness import file as heat
    from moepack.hotness import measure
    from moepack.report import trace_text
    from moepack.trace.model import Phase

    if any(os.path.realpath(path) == os.path.realpath(output) for path in paths):
        raise RequestError("it is one of the files to count", path=output)
    weights = _weights(weight_text, paths)
    inputs = [measure.Input(*pair) for pair in zip(paths, weights, strict=True)]
    wanted = frozenset({Phase.DECODE}) if phases == "decode" else None
    options = measure.Options(form, _shape(_experts_of(model_path, pack_path)), lenient, wanted)
    found, warnings = measure.count(inputs, options)
    write_whole(output, heat.encode(found))
    held = found.held_out
    facts = found.to_json() | {
        "path": output,
        "expert_count": len(found.counts),
        "held_out": held and {"by": held.by, "token_count": held.token_count},
        "warnings": warnings,
    }
    show(facts, as_json, trace_text.hotness)


def _refuse_existing(output: str, append: bool) -> None:
    if not append and Path(output).exists():
        raise RequestError("it exists", path=output, hint="--append adds to it")


def _experts_of(model_path: str | None, pack_path: str | None) -> dict[int, tuple[int, int]] | None:
    """Give how many experts each layer of the model or the pack has, and the bytes of one."""
    from moepack.source import experts
    from moepack.source.shards import open_source

    if model_path and pack_path:
        raise RequestError("a model and a pack at once", expected="one of the two")
    if model_path:
        return {
            family.layer: (family.expert_count, sum(part.length for part in family.parts))
            for family in experts.find_experts(open_source([model_path])).families
            if family.name == "ffn_exps"
        }
    if pack_path:
        with moepack.open(pack_path) as pack:
            return {
                layer: (pack.expert_count(layer), pack.locate(layer, 0).length)
                for layer in pack.layers
            }
    return None


def _shape(found: "dict[int, tuple[int, int]] | None") -> "Shape | None":
    return None if found is None else {layer: count for layer, (count, _) in found.items()}


def _lengths(found: dict[int, tuple[int, int]] | None) -> Any:
    """Give the bytes of each expert [layers, experts]; None where nothing tells."""
    import numpy as np

    if found is None:
        return None
    widest = max(count for count, _ in found.values())
    table = np.zeros((max(found) + 1, widest), np.int64)
    for layer, (count, length) in found.items():
        table[layer, :count] = length
    return table


def _weights(text: str | None, paths: tuple[str, ...]) -> list[float]:
    if text is None:
        return [1.0] * len(paths)
    try:
        weights = [float(item) for item in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(paths) or not all(0 < one <= 1e6 for one in weights):
        expected = f"{len(paths)} numbers above 0, one for each file"
        raise RequestError("not weights", place="--weights", expected=expected, found=text)
    return weights
