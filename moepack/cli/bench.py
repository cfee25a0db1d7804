"""The command `bench`: what this machine's drive can do, and what a pack is worth on it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

import moepack
from moepack.cli.terminal import json_option, progress, show, source_option
from moepack.errors import RequestError
from moepack.sizes import parse_size

if TYPE_CHECKING:
    from moepack.bench.workload import Routing
    from moepack.reading.pack import Pack
    from moepack.source.experts import Experts
    from moepack.source.shards import Source

_MOST_TOKENS = 512
_MOST_DEPTH = 256


@click.command()
@click.argument("pack_path", metavar="PACK")
@source_option
@click.option("--trace", "trace_path", metavar="FILE", help="Read the experts of this trace.")
@click.option("--hotness", "hotness_path", metavar="FILE", help="Draw experts by these counts.")
@click.option(
    "--experts-used", type=click.IntRange(1, 1024), help="Experts a token and layer, when drawn."
)
@click.option(
    "--backend",
    "backend_name",
    type=click.Choice(["auto", "uring", "direct", "buffered"]),
    default="auto",
    show_default=True,
    help="What reads.",
)
@click.option(
    "--depths", default="1,4,16", show_default=True, help="Reads in flight, for the routed reads."
)
@click.option("--rounds", type=click.IntRange(1, 100), default=4, show_default=True)
@click.option(
    "--length",
    "length_text",
    default="256MiB",
    show_default=True,
    help="Bytes of experts in each measurement.",
)
@click.option(
    "--point-seconds",
    type=click.FloatRange(0, 60),
    default=0.25,
    show_default=True,
    help="For each point of the surface; 0 leaves it out.",
)
@click.option("--plot", "plot_path", metavar="FILE", help="Draw the surface: SVG or PNG.")
@json_option
def bench(
    pack_path: str,
    source_paths: tuple[str, ...],
    trace_path: str | None,
    hotness_path: str | None,
    experts_used: int | None,
    backend_name: str,
    depths: str,
    rounds: int,
    length_text: str,
    point_seconds: float,
    plot_path: str | None,
    as_json: bool,
) -> None:
    """Measure the drive that PACK lies on, and what the pack is worth there.

    The experts of a trace, or drawn by hotness, are read from the pack and, with --source, from the
    shards: past the page cache and memory-mapped, cold and warm, in turns.

    Example: moepack bench model.moepack --source model-00001-of-00004.gguf
    """
    from moepack.bench import run as measuring
    from moepack.report import bench_text, chart
    from moepack.storage import probe

    if plot_path:
        chart.check(plot_path)
    settings = measuring.Settings(
        _parse_depths(depths), rounds, _parse_length(length_text), point_seconds
    )
    if plot_path and not point_seconds:
        raise RequestError("there is no surface to draw", place="--plot", found="--point-seconds 0")
    with moepack.open(pack_path) as pack:
        model = _open_model(source_paths) if source_paths else None
        workload = _routing(pack, model, trace_path, hotness_path, experts_used)
        backend, why = probe.choose(backend_name, pack.file_paths, max(settings.depths))
        count = measuring.measurement_count(pack, model is not None, settings)
        try:
            with progress(count, "measuring", "") as advanced:
                facts = measuring.run(pack, backend, workload, model, settings, advanced)
        finally:
            backend.close()
    facts["why"] = why
    facts["notes"] = bench_text.notes(facts)
    if plot_path:
        chart.surface(facts["surface"], f"{pack_path}, {facts['backend']}", plot_path)
    show(facts, as_json, bench_text.text)


def _open_model(paths: tuple[str, ...]) -> "tuple[Source, Experts]":
    from moepack.source import experts
    from moepack.source.shards import open_source

    source = open_source(paths)
    return source, experts.find_experts(source)


def _routing(
    pack: "Pack",
    model: "tuple[Source, Experts] | None",
    trace_path: str | None,
    hotness_path: str | None,
    experts_used: int | None,
) -> "Routing":
    """Take the routing from a trace, or draw it by the best counts there are."""
    from moepack.bench import workload
    from moepack.hotness import measure

    expert_counts = {layer: pack.expert_count(layer) for layer in pack.layers}
    if trace_path and hotness_path:
        raise RequestError("a trace and hotness at once", expected="one of the two")
    if trace_path:
        return workload.from_trace(trace_path, expert_counts, _MOST_TOKENS)
    used = experts_used or _experts_used(model) or workload.USUAL_EXPERTS_USED
    counts: Mapping[tuple[int, int], int]
    if hotness_path:
        counts = measure.load(hotness_path, expert_counts).counts
        origin = f"drawn by {hotness_path}"
    else:
        counts = _stored_counts(pack)
        origin = "drawn by the pack's hotness" if counts else "drawn evenly: no hotness is known"
    return workload.from_counts(
        counts, expert_counts, used, _MOST_TOKENS, f"{origin}, {used} experts a layer"
    )


def _experts_used(model: "tuple[Source, Experts] | None") -> int | None:
    value = model[0].model_value("expert_used_count") if model else None
    return value if isinstance(value, int) and value > 0 else None


def _stored_counts(pack: "Pack") -> dict[tuple[int, int], int]:
    from moepack.report import facts

    blobs = facts.main_blobs(pack)
    return {(one.layer, one.expert): one.hotness for one in blobs if one.hotness}


def _parse_depths(text: str) -> tuple[int, ...]:
    items = text.split(",")
    if not all(item.strip().isdecimal() and 1 <= int(item) <= _MOST_DEPTH for item in items):
        expected = f"numbers from 1 to {_MOST_DEPTH}: 1,4,16"
        raise RequestError("not a list of depths", place="--depths", expected=expected, found=text)
    return tuple(sorted({int(item) for item in items}))


def _parse_length(text: str) -> int:
    try:
        length = parse_size(text)
    except ValueError as error:
        raise RequestError(f"not a length: {error}", place="--length") from None
    if length < 1:
        raise RequestError("not a length", place="--length", expected="1 byte or more")
    return length
