"""The section about the model: its parts in bytes, as one bar."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from moepack.common.shape import is_row_table
from moepack.common.sizes import count_text, named_text, size_text
from moepack.inspection.facts import FamilyFacts, PackFacts, SourceFacts
from moepack.pack.format.tables import PackedFamily
from moepack.report.html.drawing import size_axis, stacked_bars
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, PageSection, Picture, pair_rows
from moepack.report.page import Column, Table
from moepack.report.values import UNKNOWN, parameters_text, share_text
from moepack.source.parameters import Parameters

_DENSE = {
    "shared experts": ("c7", r"_shexp\."),
    "routers": ("c4", r"ffn_gate_inp|exp_probs"),
    "attention": ("c3", r"^blk\.\d+\.(attn|ssm|shortconv|indexer|time_mix|kda)"),
    "dense feed-forward": ("c6", r"^blk\.\d+\.ffn_(gate|up|down)\."),
    "embeddings and output": ("c2", r"^(token_embd|output)\."),
    "everything else": ("muted", ""),
}
"""The kinds of dense tensors: their colours, and patterns of their names."""
_TABLES = Key("row tables", "ink", "fill")
_EXPERT_COLOURS = ("c1", "c5", "c8")


def model_section(facts: ReportFacts) -> PageSection:
    """Write the extent of a model, and draw its bytes by part."""
    parts = _parts(facts)
    total = sum(parts.values())
    rest = "all else but its row tables" if _TABLES in parts else "everything else"
    texts = {key: (size_text(length), share_text(length / total)) for key, length in parts.items()}
    pieces = [(key, parts[key], ", ".join(text)) for key, text in texts.items()]
    columns = (Column("part", "l"), Column("bytes"), Column("share"))
    table = Table(columns, [(key.label, *text) for key, text in texts.items()])
    figure = Picture(
        "parts",
        "Bytes by part",
        f"One bar of {size_text(total)}, divided into "
        + ", ".join(f"{key.label} {share}" for key, (_, share) in texts.items()),
        stacked_bars(size_axis("", total), {"": pieces}, 2.5),
    )
    return PageSection(
        name="model",
        sentence=f"{facts.model.expert_length / total:.0%} of its {size_text(total)} are experts, "
        f"of which a token uses {_used(facts.model)}; {rest} is used by every token",
        figures=(figure,),
        tables=(DataTable("Bytes by part", table, tuple(parts)), _extent(facts)),
        unknown=_unknown(facts.model),
        headline=_headline(facts, total),
    )


def _parts(facts: ReportFacts) -> dict[Key, int]:
    """Return the bytes of each part: experts by projection, dense tensors by kind, padding."""
    experts: Counter[str] = Counter()
    for layer_count, family in _families(facts.model):
        parts = family.part_kinds if isinstance(family, PackedFamily) else family.parts
        for part in parts:  # a projection's small parts with its matrix
            name = re.sub(r"^ffn_|_(ch)?exps?$", "", part.name.partition(".")[0])
            experts[name] += part.length * family.expert_count * layer_count
    dense: Counter[Key] = Counter()
    for tensor in facts.tensors:
        dense[_kind(tensor.name)] += tensor.length
    colours = cycle(_EXPERT_COLOURS)
    lengths = {
        Key(f"experts: {name}", next(colours), "fill"): length
        for name, length in experts.most_common()
    }
    lengths |= dict(dense.most_common())
    if isinstance(facts.model, PackFacts) and facts.model.padding_length:
        lengths[Key("padding", "grid", "fill")] = facts.model.padding_length
    return lengths


def _kind(tensor: str) -> Key:
    if is_row_table(tensor):
        return _TABLES
    kinds = (
        Key(name, colour, "fill")
        for name, (colour, pattern) in _DENSE.items()
        if re.search(pattern, tensor)
    )
    return next(kinds)


def _families(model: SourceFacts | PackFacts) -> Iterator[tuple[int, FamilyFacts | PackedFamily]]:
    """Yield the families, each with the number of its layers."""
    if isinstance(model, PackFacts):
        yield from ((1, family) for family in model.families)
    else:
        yield from ((len(family.layers), family) for family in model.families)


def _extent(facts: ReportFacts) -> DataTable:
    model = facts.model
    source = model.source if isinstance(model, PackFacts) else model
    rows = [
        ("architecture", source.architecture or UNKNOWN),
        ("layers with experts", named_text("layer", model.layers).partition(" ")[2] or UNKNOWN),
        ("experts", _experts(model)),
        ("experts of a token", _used(model)),
        ("shards", f"{len(source.shards):,}"),
    ]
    parameters = _parameters(facts)
    if parameters is not None:
        rows.append(("parameters", parameters_text(parameters.total)))
        rows.append(("parameters active in a token", parameters_text(parameters.active)))
    if isinstance(model, PackFacts):
        rows.append(("layout of the pack", model.layout_name or UNKNOWN))
        rows.append(("made by", model.tool))
    return DataTable("Facts", pair_rows(rows), place="under")


def _parameters(facts: ReportFacts) -> Parameters | None:
    """Return the parameters: a pack alone does not say how many there are."""
    if isinstance(facts.model, SourceFacts):
        return facts.model.parameters
    return None if facts.placement is None else facts.placement.parameters


def _headline(facts: ReportFacts, total: int) -> tuple[tuple[str, str], ...]:
    parameters = _parameters(facts)
    lines = [(size_text(total), "of weights"), (_experts(facts.model), "layers × experts")]
    if parameters is not None:
        active = f"parameters, {parameters_text(parameters.active)} active in a token"
        lines.insert(0, (parameters_text(parameters.total), active))
    return tuple(lines)


def _experts(model: SourceFacts | PackFacts) -> str:
    """Write the layers times their experts: `48 × 128`."""
    layers: dict[int, int] = {}
    for _, family in _families(model):
        numbers = (family.layer,) if isinstance(family, PackedFamily) else family.layers
        layers = dict.fromkeys(numbers, family.expert_count) | layers
    counts = Counter(layers.values())
    return " + ".join(f"{count} × {experts}" for experts, count in counts.items()) or UNKNOWN


def _used(model: SourceFacts | PackFacts) -> str:
    """Write the number of experts of a token in each layer."""
    if isinstance(model, PackFacts):
        used: Any = next(iter(model.source.experts_used.values()), None)
    else:
        used = model.experts_used
    if isinstance(used, int):
        return f"{used} in each layer"
    numbers = [number for number in used or () if number]
    return f"{min(numbers)} to {max(numbers)} by layer" if numbers else "an unknown number"


def _unknown(model: SourceFacts | PackFacts) -> tuple[str, ...]:
    if isinstance(model, PackFacts) and model.dense_length is None:
        return ("the pack has experts alone: the bytes of everything else are not in the bar",)
    if isinstance(model, SourceFacts) and model.mtp_layers:
        count = count_text(len(model.mtp_layers), "layer")
        use = "which llama.cpp runs only to draft tokens"
        return (f"{count} for multi-token prediction, {use}, are counted",)
    return ()
