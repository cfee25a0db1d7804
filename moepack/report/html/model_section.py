"""The section about the model: its parts in bytes, as one bar."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from moepack.common.shape import is_row_table
from moepack.common.sizes import count_text, named_text, size_text
from moepack.inspection.facts import FamilyFacts, PackFacts, SourceFacts
from moepack.pack.format.tables import PackedFamily
from moepack.report.html.drawing import size_axis, stacked_bars
from moepack.report.html.facts import ReportFacts
from moepack.report.html.section import DataTable, Key, PageSection, Picture, pair_rows
from moepack.report.table import Column, Table
from moepack.report.values import UNKNOWN, parameters_text, share_text
from moepack.source.parameters import Parameters

_DENSE = (
    ("shared experts", r"_shexp\."),
    ("routers", r"ffn_gate_inp|exp_probs"),
    ("attention", r"^blk\.\d+\.(attn|ssm|shortconv|indexer|time_mix|kda)"),
    ("dense feed-forward", r"^blk\.\d+\.ffn_(gate|up|down)\."),
    ("embeddings and output", r"^(token_embd|output)\."),
)
_EXPERTS = "experts: "
_OTHERS, _TABLES, _PADDING = "everything else", "row tables", "padding"
_EXPERT_COLOURS = ("c1", "c5", "c8")
_DENSE_COLOURS = ("c2", "c3", "c4", "c6")


def model_section(facts: ReportFacts) -> PageSection:
    """Write the extent of a model, and draw its bytes by part."""
    parts = dict(_parts(facts))
    total = sum(parts.values())
    experts = facts.model.expert_length
    keys = _keys(parts)
    has_tables = any(is_row_table(tensor.name) for tensor in facts.tensors)
    rest = "all else but its row tables" if has_tables else "everything else"
    rows = [(name, size_text(length), share_text(length / total)) for name, length in parts.items()]
    columns = (Column("part", "l"), Column("bytes"), Column("share"))
    pieces = [
        (key, length, f"{size}, {share}")
        for key, length, (_, size, share) in zip(keys, parts.values(), rows, strict=True)
    ]
    figure = Picture(
        "parts",
        "Bytes by part",
        f"One bar of {size_text(total)}, divided into "
        + ", ".join(f"{name} {share}" for name, _, share in rows),
        stacked_bars(size_axis("", total), {"": pieces}, 2.5),
    )
    return PageSection(
        name="model",
        sentence=f"{experts / total:.0%} of its {size_text(total)} are experts, of which a token "
        f"uses {_used(facts.model)}; {rest} is used by every token",
        figures=(figure,),
        tables=(DataTable("Bytes by part", Table(columns, rows), tuple(keys)), _extent(facts)),
        unknown=_unknown(facts.model),
        headline=_headline(facts, total),
    )


def _parts(facts: ReportFacts) -> Iterator[tuple[str, int]]:
    """Yield the parts with their bytes: experts by projection, then dense tensors by kind."""
    lengths: Counter[str] = Counter()
    for layer_count, family in _families(facts.model):
        for part in family.part_kinds if isinstance(family, PackedFamily) else family.parts:
            name = re.sub(r"^(ffn_)?|_(ch)?exps?\b|\.weight$", "", part.name)
            lengths[f"{_EXPERTS}{name}"] += part.length * family.expert_count * layer_count
    yield from _longest(lengths, len(_EXPERT_COLOURS), f"{_EXPERTS}others")
    dense: Counter[str] = Counter()
    for tensor in facts.tensors:
        dense[_kind(tensor.name)] += tensor.length
    yield from _longest(dense, len(_DENSE_COLOURS), _OTHERS)
    if isinstance(facts.model, PackFacts) and facts.model.padding_length:
        yield _PADDING, facts.model.padding_length


def _longest(lengths: Counter[str], count: int, others: str) -> Iterator[tuple[str, int]]:
    """Yield so many of the longest, then all others together."""
    rest = lengths.pop(others, 0)
    ordered = lengths.most_common()
    yield from ordered[:count]
    rest += sum(length for _, length in ordered[count:])
    if rest:
        yield others, rest


def _keys(parts: Iterable[str]) -> list[Key]:
    """Return the legend: shades of one colour for experts, other colours for the rest."""
    experts, dense = iter(_EXPERT_COLOURS), iter(_DENSE_COLOURS)
    fixed = {_OTHERS: "c7", _PADDING: "grid"}
    return [
        Key(name, fixed.get(name) or next(experts if _is_expert(name) else dense, "muted"), "fill")
        for name in parts
    ]


def _is_expert(part: str) -> bool:
    return part.startswith(_EXPERTS)


def _families(model: SourceFacts | PackFacts) -> Iterator[tuple[int, FamilyFacts | PackedFamily]]:
    """Yield the families, each with the number of its layers."""
    if isinstance(model, PackFacts):
        yield from ((1, family) for family in model.families)
    else:
        yield from ((len(family.layers), family) for family in model.families)


def _kind(tensor: str) -> str:
    if is_row_table(tensor):
        return _TABLES
    return next((kind for kind, pattern in _DENSE if re.search(pattern, tensor)), _OTHERS)


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
    counts: Counter[int] = Counter()
    layers: dict[int, int] = {}
    for _, family in _families(model):
        numbers = (family.layer,) if isinstance(family, PackedFamily) else family.layers
        layers |= {number: family.expert_count for number in numbers if number not in layers}
    counts.update(layers.values())
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
