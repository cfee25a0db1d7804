"""The section about a placement: the contents of each memory of a machine."""

from __future__ import annotations

from moepack.common.sizes import size_text
from moepack.planning.placing.engines import PACK
from moepack.planning.placing.facts import DeviceFacts
from moepack.report import plan_text
from moepack.report.html.drawing import size_axis, stacked_bars
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import Key, PageSection, Picture, adding

_KEYS = (
    Key("dense", "c2", "fill"),
    Key("context", "c3", "fill"),
    Key("experts", "c1", "fill"),
    Key("computing", "c4", "fill"),
    Key("left", "grid", "fill"),
)


def placement_section(facts: ReportFacts) -> PageSection | str:
    """Draw the contents of the memories, and write the command lines."""
    placement = facts.placement
    if placement is None:
        problem = facts.problems.get("placement", "that takes the memories of a machine")
        return adding(problem, "MODEL --machine FILE")
    option, devices = placement.option, placement.devices
    lengths = (
        (option.vram_expert_length, "in VRAM"),
        (option.memory_expert_length, "in memory"),
        (option.streamed_length, "on the drive"),
    )
    experts = ", ".join(f"{size_text(length)} {where}" for length, where in lengths if length)
    engine = "moepack run" if placement.engine == PACK else placement.engine
    pieces = {device.name: _pieces(device) for device in devices}
    texts = (
        f"{device.name} of {size_text(device.length)}: "
        + ", ".join(f"{key.label} {size}" for key, length, size in pieces[device.name] if length)
        for device in devices
    )
    longest = max(
        max(device.length, sum(length for _, length, _ in pieces[device.name]))
        for device in devices
    )
    return PageSection(
        name="placement",
        sentence=f"under {engine}, with {placement.context:,} tokens of context: experts take "
        f"{experts or 'no bytes'}",
        figures=(
            Picture(
                "placement",
                "Bytes in each memory",
                f"A bar for each memory. {'; '.join(texts)}.",
                stacked_bars(size_axis("", longest), pieces, 2.2),
                keys=_KEYS,
            ),
        ),
        blocks=plan_text.placement(placement).blocks,
    )


def _pieces(device: DeviceFacts) -> list[tuple[Key, int, str]]:
    lengths = (
        device.dense_length,
        device.context_length,
        device.expert_length,
        device.compute_length,
        max(0, device.left_length),
    )
    return [(key, length, size_text(length)) for key, length in zip(_KEYS, lengths, strict=True)]
