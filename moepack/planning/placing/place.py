"""Placements: the parts of a model on the memories of a machine, as a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath
from moepack.common.sizes import Size, parse_size
from moepack.pack.opening.open_model import Model, is_pack, path_of
from moepack.planning.footprint.context import (
    IK_LLAMA_SERVER,
    LLAMA_SERVER,
    MOEPACK_RUN,
    ContextOptions,
)
from moepack.planning.footprint.model import footprint_of
from moepack.planning.forecasting.facts import SpeedFacts
from moepack.planning.forecasting.forecast import forecast
from moepack.planning.machine.described import AnyMachine, find_machine
from moepack.planning.machine.model import Machine
from moepack.planning.placing.engines import IK_LLAMA, LLAMA, place_stock, place_streamed
from moepack.planning.placing.facts import OptionFacts, PlacementFacts
from moepack.planning.placing.offload import PACK, PlacementRequest, offload
from moepack.planning.placing.pins import judge_hotness
from moepack.traces.formats.reading import AnyTrace, spooled
from moepack.traces.formats.registry import ReadOptions
from moepack.traces.hotness.model import Hotness
from moepack.traces.spool import SpooledTrace

_CONTEXTS = {LLAMA: LLAMA_SERVER, IK_LLAMA: IK_LLAMA_SERVER, PACK: MOEPACK_RUN}
ENGINES = tuple(_CONTEXTS)
_CONTEXT = 32768
"""The default in tokens, for models that were trained for as much."""
_LEAST_BATCH = 512
"""Tokens of a prompt computed at once if more are of no use: llama.cpp's default."""
_GPU_BATCHES, _BATCHES = (4096, 2048, 1024), (2048, 1024)
"""The same if experts come from memory or the drive: as many as fit."""


def place(
    model: Model,
    machine: AnyMachine,
    *,
    engine: str | None = None,
    context: int | None = None,
    margin: Size = 1 << 30,
    hotness: AnyPath | Hotness | None = None,
    traces: AnyTrace = (),
    cache_types: tuple[str, str] = ("f16", "f16"),
    prompt: int = 1000,
    micro_batch: int | None = None,
) -> PlacementFacts:
    """Place a model in the memories of a machine, and return the command line for it.

    `model` is a source or a pack, open or not, `engine` one of ENGINES: by default `pack` for a
    pack, else llama.cpp. `machine` is one, the path of its file, or `preset:NAME`: placements are
    forecast if any bandwidth is known. `margin` bytes of each are left free. `context` is in
    tokens, by default 32,768, or the length the model was trained for if that is less; its keys and
    values are of `cache_types`. `traces` (files, or what `read_trace` returned), or `hotness` (a
    file, or one that was read), decide whether single experts are worth pinning. Prompts are
    computed in batches of `micro_batch` tokens, by default of as many as suit the placement; one of
    `prompt` tokens is forecast.

    Raises RequestError for invalid options and below the floor, with the missing bytes; and what
    opening the model, the machine and the traces raises.
    """
    engine = engine or (PACK if is_pack(model) else LLAMA)
    margin = parse_size(margin, "margin")
    _check(model, engine, bool(hotness), bool(traces))
    box = find_machine(machine)
    type_k, type_v = cache_types
    footprint = footprint_of(model)
    if context is None:
        attention = footprint.attention
        context = min(_CONTEXT, (attention and attention.context_length) or _CONTEXT)

    def request_for(machine: Machine, defaults: ContextOptions) -> PlacementRequest:
        options = defaults._replace(token_count=context, type_k=type_k, type_v=type_v)

        def request_with(batch: int) -> PlacementRequest:
            sized = options._replace(batch_count=min(batch, context))
            return PlacementRequest(footprint, sized, machine, engine, margin)

        return _fitting(request_with) if micro_batch is None else request_with(micro_batch)

    has_server = engine == PACK and bool(box.gpus)
    request = request_for(box, _CONTEXTS[LLAMA if has_server else engine])
    shape = footprint.weights.shape
    judged = None if hotness is None else judge_hotness(hotness, shape)
    with spooled(traces, ReadOptions(shape=shape)) as trace:
        facts = place_streamed(request, judged, trace) if request.streams else place_stock(request)
        options = [facts.option, *facts.alternatives]
        if has_server and facts.option.cpu_layer_count is not None:
            plain = request_for(box._replace(gpus=()), _CONTEXTS[PACK])
            if _fits(plain, is_offloaded=False):
                options.append(place_streamed(plain, judged, trace).option)
        if box.memory_bandwidth or box.vram_bandwidth:
            options = [
                replace(one, forecast=_forecast(request, one, trace, prompt)) for one in options
            ]
    return replace(facts, option=options[0], alternatives=tuple(options[1:]))


def _fitting(request_with: Callable[[int], PlacementRequest]) -> PlacementRequest:
    """Return a request with a micro-batch that suits it.

    It is llama.cpp's default if all experts are in VRAM, or in memory beside a stock engine.
    """
    least = request_with(_LEAST_BATCH)
    whole = offload(least)
    is_in_memory = not least.streams and whole is None
    if is_in_memory or (whole is not None and not whole.cpu_layer_count):
        return least
    for batch in _GPU_BATCHES if whole is not None else _BATCHES:
        request = request_with(batch)
        if _fits(request, is_offloaded=whole is not None):
            return request
    return least


def _fits(request: PlacementRequest, *, is_offloaded: bool) -> bool:
    if not is_offloaded:
        return request.memory_capacity - request.working_length >= request.floor
    placed = offload(request)
    if placed is None:
        return False
    experts = placed.memory_length
    if request.streams:
        experts = min(request.floor, experts)
    return request.embedding_length + experts <= request.memory_beside(placed)


def _forecast(
    request: PlacementRequest, option: OptionFacts, trace: SpooledTrace | None, prompt: int
) -> SpeedFacts:
    """Forecast an option."""
    has_gpu = option.cpu_layer_count is not None
    machine, is_pack_run = request.machine, request.streams
    streams = is_pack_run and (option.streamed_length or not has_gpu)
    return forecast(
        request.footprint,
        machine if has_gpu else machine._replace(gpus=()),
        cpu_layer_count=option.cpu_layer_count,
        budget=option.memory_expert_length if streams else None,
        dense_in_memory=is_pack_run and not has_gpu,
        traces=trace or (),
        vram_cache=option.vram_cache_length,
        micro_batch=option.micro_batch,
        prompt=prompt,
        context=request.context,
    ).forecasts[0]


def _check(model: Model, engine: str, has_hotness: bool, has_traces: bool) -> None:
    if engine not in ENGINES:
        raise RequestError("no such engine", expected=", ".join(ENGINES), found=engine)
    if engine != PACK and is_pack(model):
        hint = "name the source, or place for `engine=pack`"
        raise RequestError(f"{engine} reads GGUF, not packs", path=path_of(model), hint=hint)
    if engine != PACK and (has_hotness or has_traces):
        hint = "`engine=pack` places single experts"
        raise RequestError(f"{engine} places whole layers: hotness is of no use", hint=hint)
    if has_hotness and has_traces:
        raise RequestError("either traces or hotness")
