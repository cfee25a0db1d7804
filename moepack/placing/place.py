"""Placements: what of a model goes where on a machine, for an engine, as a command line."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.errors import RequestError
from moepack.footprint.context import IK_LLAMA_SERVER, LLAMA_SERVER, MOEPACK_RUN
from moepack.forecasting.facts import SpeedFacts
from moepack.forecasting.forecast import forecast
from moepack.machine.file import read_machine
from moepack.machine.model import Figure, Gpu, Machine
from moepack.paths import AnyPath, PathOrPaths, listed
from moepack.placing.facts import PlacementFacts
from moepack.placing.load import load_of
from moepack.placing.request import Request
from moepack.placing.stock import IK_LLAMA, LLAMA, Placement, place_stock
from moepack.placing.streamed import PACK, expert_budget, pins, run_option
from moepack.reading.directory import named_pack

_CONTEXTS = {LLAMA: LLAMA_SERVER, IK_LLAMA: IK_LLAMA_SERVER, PACK: MOEPACK_RUN}
ENGINES = tuple(_CONTEXTS)


def place(
    paths: PathOrPaths,
    machine: Machine | AnyPath | None = None,
    *,
    engine: str | None = None,
    context: int = 32768,
    vram: Sequence[int] = (),
    memory: int | None = None,
    margin: int = 1 << 30,
    hotness: str | None = None,
    traces: Sequence[str] = (),
    cache_types: tuple[str, str] = ("f16", "f16"),
) -> PlacementFacts:
    """Say what of a model goes where, and how that is said to an engine.

    `paths` is a source or a pack, `engine` one of ENGINES: by default `pack` for a pack, else
    llama.cpp. `machine` is one or the path of its file; `vram` (bytes of each GPU) and `memory`
    stand in for what it says. `margin` bytes of each are left free. `context` is in tokens, its
    keys and values are of `cache_types`. `traces`, or a file of `hotness`, say whether single
    experts are worth pinning.

    Raises RequestError for options that are none and below the floor, with what is missing; and
    what opening the model, the machine and the traces raises.
    """
    engine = engine or (PACK if named_pack(paths) else LLAMA)
    _check(paths, engine, margin, hotness, traces)
    known = _machine(machine, vram, memory)
    type_k, type_v = cache_types
    options = _CONTEXTS[engine]._replace(token_count=context, type_k=type_k, type_v=type_v)
    load = load_of(paths, options)
    request = Request(load, known, engine, context, margin, cache_types)
    pinned, budget = None, None
    if engine == PACK:
        budget = expert_budget(request)
        pinned = pins(request, budget, hotness, traces)
        device, option = request.memory_device(budget), run_option(request, budget, pinned)
        placed = Placement((device,), option)
    else:
        placed = place_stock(request)
        if placed.cpu_layer_count is None:
            known = known._replace(gpus=())
    speed: SpeedFacts | None = None
    if machine is not None:
        speed = forecast(
            *(paths, known),
            cpu_layer_count=placed.cpu_layer_count,
            budget=budget,
            dense_in_memory=engine == PACK,
            traces=traces,
            context=context,
        ).forecasts[0]
    return PlacementFacts(
        model=load.path,
        engine=engine,
        context=context,
        margin_length=margin,
        parameters=load.parameters,
        devices=placed.devices,
        option=placed.option,
        alternatives=placed.alternatives,
        notes=placed.notes,
        pins=pinned,
        forecast=speed,
    )


def _machine(machine: Machine | AnyPath | None, vram: Sequence[int], memory: int | None) -> Machine:
    """Return the machine, with what was said instead of its own figures."""
    if machine is not None:
        known = machine if isinstance(machine, Machine) else read_machine(machine)
    elif memory is not None:
        known = Machine(None, Figure(memory, "typed"), None)
    else:
        hint = "--machine FILE says it, or --ram SIZE and --vram SIZE do"
        raise RequestError("it is not known how much memory there is", hint=hint)
    if memory is not None:
        known = known._replace(memory=Figure(memory, "typed"))
    if vram:
        stated = dict(enumerate(known.gpus))
        unknown = Gpu(None, Figure(0, "typed"), None)
        gpus = (
            stated.get(number, unknown)._replace(memory=Figure(length, "typed"))
            for number, length in enumerate(vram)
        )
        known = known._replace(gpus=tuple(gpus))
    return known


def _check(
    paths: PathOrPaths, engine: str, margin: int, hotness: str | None, traces: Sequence[str]
) -> None:
    if engine not in ENGINES:
        raise RequestError("no such engine", expected=", ".join(ENGINES), found=engine)
    if engine != PACK and named_pack(paths):
        hint = "name the source, or place for --engine pack"
        raise RequestError(f"{engine} reads GGUF, not packs", path=listed(paths)[0], hint=hint)
    if engine != PACK and (hotness or traces):
        hint = "--engine pack places single experts"
        raise RequestError(f"{engine} places whole layers: hotness is of no use", hint=hint)
    if hotness and traces:
        raise RequestError("either traces or hotness")
    if margin < 0:
        raise RequestError("not a margin", place="margin", expected="0 or more", found=margin)
