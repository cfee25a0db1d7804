"""Placements, written for people."""

from collections.abc import Iterator

from moepack.common.sizes import size_text
from moepack.planning.placing.facts import OptionFacts, PinFacts, PlacementFacts
from moepack.report.forecast_text import prompt_words, speed_words, table_words
from moepack.report.page import Block, Page, Verbatim
from moepack.report.table import Column, Table
from moepack.report.values import parameters_text, share_text


def text(facts: PlacementFacts) -> Page:
    """Write the memories with their contents, and the command lines."""
    return Page(*_blocks(facts))


def _blocks(facts: PlacementFacts) -> Iterator[Block]:
    counts = facts.parameters
    numbers = (counts.total, counts.expert, counts.dense, counts.embedding, counts.active)
    total, expert, dense, embedding, active = map(parameters_text, numbers)
    yield (
        f"{facts.model}: {total} parameters: {expert} in experts, {dense} dense, {embedding} in "
        f"embeddings; {active} are active in a token, but all take memory"
    )
    if facts.table_length:
        yield table_words(facts.table_length)
    yield ""
    yield memories(facts)
    yield ""
    yield from option_blocks(facts.option)
    for one in facts.alternatives:
        yield "or:"
        yield from option_blocks(one)
    yield from (f"note: {line}" for line in facts.notes)
    if facts.pins is not None:
        yield from pin_lines(facts.pins)
    speeds = [one.forecast for one in (facts.option, *facts.alternatives)]
    lines = (line for speed in speeds if speed is not None for line in speed.warnings)
    yield from (f"note: {line}" for line in dict.fromkeys(lines))


def memories(facts: PlacementFacts) -> Table:
    """Write the contents of each memory."""
    rows = []
    for device in facts.devices:
        left = device.left_length
        rows.append(
            [
                device.name,
                size_text(device.length),
                size_text(device.dense_length),
                size_text(device.context_length),
                size_text(device.expert_length),
                size_text(device.compute_length),
                size_text(left) if left >= 0 else f"-{size_text(-left)}",
            ]
        )
    return Table(_MEMORIES, rows)


_MEMORIES = (
    *(Column("", "l", least=12), Column("size", rank=1), Column("dense", rank=4)),
    *(Column("context", rank=3), Column("experts"), Column("computing", rank=5), Column("left")),
)


def option_blocks(option: OptionFacts) -> Iterator[Block]:
    """Write a command line, and where it puts experts."""
    yield Verbatim(f"  {option.command}")
    parts = [(option.vram_expert_length, "in VRAM"), (option.memory_expert_length, "in memory")]
    parts.append((option.streamed_length, "on the drive"))
    experts = [f"{size_text(length)} {where}" for length, where in parts if length]
    if option.vram_cache_length is not None:
        experts[0] += ", a cache"
    yield f"  experts: {', '.join(experts)}"
    if option.forecast is not None:
        yield f"  decode: {speed_words(option.forecast)}"
        yield f"  prompt: {prompt_words(option.forecast.prompt)}"


def pin_lines(pins: PinFacts) -> Iterator[str]:
    """Write the hit rates that decide about pinning, and the decision."""
    static, lru = share_text(pins.static_hit_rate), share_text(pins.lru_hit_rate)
    yield f"hits at this budget: the hottest that fit {static}, LRU {lru}"
    pinned = f"pinned: {size_text(pins.pin_length)}" if pins.pin_length else "none is pinned"
    yield f"{pinned}; {pins.reason}"
