"""The section about a placement: the contents of each memory of a machine."""

from __future__ import annotations

from typing import Any

from moepack.common.sizes import size_text
from moepack.planning.placing.facts import DeviceFacts, PlacementFacts
from moepack.planning.placing.streamed import PACK
from moepack.report import placement_text
from moepack.report.html.drawing import COLOURS, MUTED, PAPER, bytes_axis, draw
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, MissingSection, PageSection, Picture
from moepack.report.page import Block
from moepack.report.table import Column, Table

TITLE = "Where everything goes"
_KEYS = (
    Key("dense", "c2", "fill"),
    Key("context", "c3", "fill"),
    Key("experts", "c1", "fill"),
    Key("computing", "c4", "fill"),
    Key("left", "grid", "fill"),
)


def placement_section(facts: ReportFacts) -> PageSection | MissingSection:
    """Draw the contents of the memories, and write the command lines."""
    placement = facts.placement
    if placement is None:
        problem = facts.problems.get("placement", "that takes the memories of a machine")
        hint = "`moepack report MODEL --machine FILE -o report.html` adds it"
        return MissingSection(TITLE, f"{problem}; {hint}")
    devices = placement.devices
    figure = Picture(
        "placement",
        "Bytes in each memory",
        "A bar for each memory. " + " ".join(map(_words, devices)),
        draw(
            "placement", (0.75 + 0.42 * len(devices),) * 2, lambda figure: _paint(figure, devices)
        ),
        keys=_KEYS,
    )
    return PageSection(
        name="placement",
        title=TITLE,
        sentence=_sentence(placement),
        figures=(figure,),
        tables=(_memories(placement),),
        blocks=tuple(_commands(placement)),
    )


def _memories(placement: PlacementFacts) -> DataTable:
    """Write the memories side by side: a row for each kind of content."""
    table = placement_text.memories(placement)
    cells = [[column.heading for column in table.columns], *table.rows]
    names, *rows = ([*row] for row in zip(*cells, strict=True))
    columns = (Column("", "l"), *(Column(name) for name in names[1:]))
    return DataTable("Memories", Table(columns, rows), (None, *_KEYS))


def _sentence(placement: PlacementFacts) -> str:
    option = placement.option
    places = (
        (option.vram_expert_length, "in VRAM"),
        (option.memory_expert_length, "in memory"),
        (option.streamed_length, "on the drive"),
    )
    experts = ", ".join(f"{size_text(length)} {where}" for length, where in places if length)
    context = f"{placement.context:,} tokens of context"
    engine = "moepack run" if placement.engine == PACK else placement.engine
    return f"Under {engine}, with {context}: experts take {experts or 'no bytes'}."


def _words(device: DeviceFacts) -> str:
    amounts = zip(_KEYS, _lengths(device), strict=True)
    parts = ", ".join(f"{key.label} {size_text(length)}" for key, length in amounts if length)
    return f"{device.name} of {size_text(device.length)}: {parts}."


def _lengths(device: DeviceFacts) -> tuple[int, ...]:
    left = max(0, device.left_length)
    lengths = (device.dense_length, device.context_length, device.expert_length)
    return (*lengths, device.compute_length, left)


def _paint(figure: Any, devices: tuple[DeviceFacts, ...]) -> Any:
    axis = figure.add_subplot()
    for row, device in enumerate(devices):
        start = 0
        for key, length in zip(_KEYS, _lengths(device), strict=True):
            colour = COLOURS[key.colour]
            axis.barh(row, length, left=start, height=0.62, color=colour, edgecolor=PAPER)
            start += length
        axis.vlines(device.length, row - 0.4, row + 0.4, color=MUTED, linewidth=1.4)
    axis.set_ylim(len(devices) - 0.5, -0.5)
    axis.set_yticks(range(len(devices)), [device.name for device in devices])
    longest = max(max(device.length, sum(_lengths(device))) for device in devices) or 1
    bytes_axis(axis, longest)
    axis.spines["left"].set_visible(False)
    return axis


def _commands(placement: PlacementFacts) -> list[Block]:
    blocks = list(placement_text.option_blocks(placement.option))
    for one in placement.alternatives:
        blocks += ["Or:", *placement_text.option_blocks(one)]
    blocks += (f"note: {note}" for note in placement.notes)
    if placement.pins is not None:
        blocks += placement_text.pin_lines(placement.pins)
    return blocks
