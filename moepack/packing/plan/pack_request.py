"""The choices that decide a pack: enough to plan the same one again elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moepack.common.errors import RequestError
from moepack.common.paths import PathOrPaths
from moepack.common.shape import ModelShape
from moepack.common.sizes import parse_layers
from moepack.packing.plan.blob_hotness import load_hotness
from moepack.packing.plan.layout import Layout, load
from moepack.packing.plan.plan import Plan, make
from moepack.source.dense import find_dense
from moepack.source.experts import find_experts, shape_of
from moepack.source.shards import Source, open_source
from moepack.traces.hotness.model import Hotness


class PlannedModel(NamedTuple):
    """An open source, the shape of its model, and the plan of its pack."""

    source: Source
    shape: ModelShape
    plan: Plan


@dataclass(frozen=True)
class PackRequest:
    """A source and the choices of `pack_model` that decide what the pack is; can be pickled."""

    source: PathOrPaths
    layout: str | os.PathLike[str] | Layout
    hotness: str | os.PathLike[str] | Hotness | None = None
    layers: str | Iterable[int] | None = None
    mtp: bool = True
    experts_only: bool = False
    alignment: int | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and not isinstance(self.layers, str):
            object.__setattr__(self, "layers", tuple(self.layers))

    def plan(self) -> PlannedModel:
        """Open the source and plan its pack. Raises as `pack_model`."""
        source = open_source(self.source)
        layout = self.layout if isinstance(self.layout, Layout) else load(self.layout)
        if self.alignment is not None:
            layout = layout.with_alignment(self.alignment)
        experts = find_experts(source)
        shape = shape_of(source, experts)
        plan = make(
            experts,
            layout,
            dense=None if self.experts_only else find_dense(source, experts),
            hotness=load_hotness(self.hotness, shape),
            layers=self._chosen_layers(shape),
        )
        return PlannedModel(source, shape, plan)

    def _chosen_layers(self, shape: ModelShape) -> Sequence[int] | None:
        layers = set(shape.layers if self.layers is None else parse_layers(self.layers))
        if not self.mtp:
            layers -= set(shape.mtp_layers)
        if not layers:
            raise RequestError("no layers are left to pack")
        return None if layers == set(shape.layers) else sorted(layers)
