"""Placements: what of a model goes where on a machine, for an engine, as a command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from moepack.errors import RequestError
from moepack.footprint.context import IK_LLAMA_SERVER, LLAMA_SERVER, MOEPACK_RUN, ContextOptions
from moepack.footprint.model import footprint_of
from moepack.forecasting.facts import SpeedFacts
from moepack.forecasting.forecast import forecast
from moepack.machine.file import read_machine
from moepack.machine.model import Figure, Gpu, Machine
from moepack.paths import AnyPath, PathOrPaths, listed, path_texts
from moepack.placing.facts import OptionFacts, PlacementFacts
from moepack.placing.load import load_of
from moepack.placing.offload import offload
from moepack.placing.request import Request
from moepack.placing.stock import IK_LLAMA, LLAMA, place_stock
from moepack.placing.streamed import PACK, place_streamed
from moepack.reading.directory import named_pack
from moepack.sizes import Size, as_list, parse_size

_CONTEXTS = {LLAMA: LLAMA_SERVER, IK_LLAMA: IK_LLAMA_SERVER, PACK: MOEPACK_RUN}
ENGINES = tuple(_CONTEXTS)
_CONTEXT = 32768
"""The default, in tokens, of models that were trained for as much."""
_LEAST_BATCH = 512
"""Tokens of a prompt that are computed at once where more are of no use: llama.cpp's default."""
_GPU_BATCHES, _BATCHES = (4096, 2048, 1024), (2048, 1024)
"""Those where experts come from memory or the drive: as many as there is room for."""


def place(
    paths: PathOrPaths,
    machine: Machine | AnyPath | None = None,
    *,
    engine: str | None = None,
    context: int | None = None,
    vram: Size | Sequence[Size] = (),
    memory: Size | None = None,
    margin: Size = 1 << 30,
    hotness: AnyPath | None = None,
    traces: PathOrPaths = (),
    cache_types: tuple[str, str] = ("f16", "f16"),
    prompt: int = 1000,
    micro_batch: int | None = None,
) -> PlacementFacts:
    """Place a model on the memories of a machine, and give the command line that does so.

    `paths` is a source or a pack, `engine` one of ENGINES: by default `pack` for a pack, else
    llama.cpp. `machine` is one or the path of its file; `vram` (bytes of each GPU) and `memory`
    stand in for what it says. `margin` bytes of each are left free. `context` is in tokens, by
    default 32,768, or what the model was trained for if that is less; its keys and values are of
    `cache_types`. `traces`, or a file of `hotness`, say whether single
    experts are worth pinning. Prompts are computed in batches of `micro_batch` tokens, by
    default of as many as suit what lies where; one of `prompt` tokens is forecast.

    Raises RequestError for options that are none and below the floor, with what is missing; and
    what opening the model, the machine and the traces raises.
    """
    engine = engine or (PACK if named_pack(paths) else LLAMA)
    hotness = None if hotness is None else os.fspath(hotness)
    traces = path_texts(traces)
    margin = parse_size(margin, "margin")
    _check(paths, engine, margin, hotness, traces)
    known = _machine(machine, vram, memory)
    type_k, type_v = cache_types
    context = _usual_context(paths) if context is None else context

    def request_for(machine: Machine, defaults: ContextOptions) -> Request:
        options = defaults._replace(token_count=context, type_k=type_k, type_v=type_v)

        def requested(batch: int) -> Request:
            load = load_of(paths, options._replace(batch_count=min(batch, context)))
            return Request(load, machine, engine, context, margin, cache_types)

        return _fitting(requested, micro_batch)

    has_server = engine == PACK and bool(known.gpus)
    request = request_for(known, _CONTEXTS[LLAMA if has_server else engine])
    placed = place_streamed(request, hotness, traces) if engine == PACK else place_stock(request)
    alternatives = placed.alternatives
    if has_server and placed.option.cpu_layer_count is not None:
        plain = request_for(known._replace(gpus=()), _CONTEXTS[PACK])
        if _has_room(plain, is_offloaded=False):
            alternatives += (place_streamed(plain, hotness, traces).option,)

    def with_forecast(option: OptionFacts) -> OptionFacts:
        if machine is None:
            return option
        speed = _forecast(paths, known, engine, option, traces, context, prompt)
        return replace(option, forecast=speed)

    load = request.load
    return PlacementFacts(
        model=load.path,
        engine=engine,
        context=context,
        margin_length=margin,
        parameters=load.parameters,
        table_length=load.weights.table_length,
        devices=placed.devices,
        option=with_forecast(placed.option),
        alternatives=tuple(map(with_forecast, alternatives)),
        notes=placed.notes,
        pins=placed.pins,
    )


def _usual_context(paths: PathOrPaths) -> int:
    attention = footprint_of(paths).attention
    return min(_CONTEXT, (attention and attention.context_length) or _CONTEXT)


def _fitting(requested: Callable[[int], Request], micro_batch: int | None) -> Request:
    """Return what is to be placed, with the micro-batch that suits it.

    It is llama.cpp's default where all experts are in VRAM, or in memory beside a stock engine.
    """
    if micro_batch is not None:
        return requested(micro_batch)
    least = requested(_LEAST_BATCH)
    has_gpu = bool(least.machine.gpus)
    whole = offload(least.load, least.rooms) if has_gpu else None
    is_in_memory = least.engine != PACK and (not has_gpu or whole is None)
    if is_in_memory or (whole is not None and not whole.cpu_layer_count):
        return least
    for batch in _GPU_BATCHES if whole is not None else _BATCHES:
        request = requested(batch)
        if _has_room(request, is_offloaded=whole is not None):
            return request
    return least


def _has_room(request: Request, *, is_offloaded: bool) -> bool:
    load, room = request.load, request.memory_room
    if not is_offloaded:
        return room - request.working_length >= load.floor
    placed = offload(load, request.rooms)
    if placed is None:
        return False
    experts = min(load.floor, placed.memory_length) if request.engine == PACK else None
    return load.embedding_length + (placed.memory_length if experts is None else experts) <= room


def _forecast(
    paths: PathOrPaths,
    machine: Machine,
    engine: str,
    option: OptionFacts,
    traces: Sequence[str],
    context: int,
    prompt: int,
) -> SpeedFacts | None:
    """Forecast an option; None where a forecast has no words for what lies where."""
    has_gpu = option.cpu_layer_count is not None
    if not has_gpu and option.vram_expert_length:
        return None
    streams = engine == PACK and (option.streamed_length or not has_gpu)
    return forecast(
        *(paths, machine if has_gpu else machine._replace(gpus=())),
        cpu_layer_count=option.cpu_layer_count,
        budget=option.memory_expert_length if streams else None,
        dense_in_memory=engine == PACK and not has_gpu,
        traces=traces,
        vram_cache=option.vram_cache_length,
        micro_batch=option.micro_batch,
        prompt=prompt,
        context=context,
    ).forecasts[0]


def _machine(
    machine: Machine | AnyPath | None, vram: Size | Sequence[Size], memory: Size | None
) -> Machine:
    """Return the machine, with what was said instead of its own figures."""
    memory = None if memory is None else parse_size(memory, "memory")
    lengths = [parse_size(length, "vram") for length in as_list(vram)]
    if machine is not None:
        known = machine if isinstance(machine, Machine) else read_machine(machine)
    elif memory is not None:
        known = Machine(None, Figure(memory, "typed"), None)
    else:
        hint = "`machine` says it, or `memory` and `vram` do"
        raise RequestError("it is not known how much memory there is", hint=hint)
    if memory is not None:
        known = known._replace(memory=Figure(memory, "typed"))
    if lengths:
        stated = dict(enumerate(known.gpus))
        unknown = Gpu(None, Figure(0, "typed"), None)
        gpus = (
            stated.get(number, unknown)._replace(memory=Figure(length, "typed"))
            for number, length in enumerate(lengths)
        )
        known = known._replace(gpus=tuple(gpus))
    return known


def _check(
    paths: PathOrPaths, engine: str, margin: int, hotness: str | None, traces: Sequence[str]
) -> None:
    if engine not in ENGINES:
        raise RequestError("no such engine", expected=", ".join(ENGINES), found=engine)
    if engine != PACK and named_pack(paths):
        hint = "name the source, or place for `engine=pack`"
        raise RequestError(f"{engine} reads GGUF, not packs", path=listed(paths)[0], hint=hint)
    if engine != PACK and (hotness or traces):
        hint = "`engine=pack` places single experts"
        raise RequestError(f"{engine} places whole layers: hotness is of no use", hint=hint)
    if hotness and traces:
        raise RequestError("either traces or hotness")
    if margin < 0:
        raise RequestError("not a margin", place="margin", expected="0 or more", found=margin)
