"""The model of a trace: its shape, which limits the experts that routers can select."""

from moepack.common.shape import ModelShape
from moepack.pack.opening.open_model import Model, pack_or_source
from moepack.pack.reading.pack import Pack
from moepack.source.experts import find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.traces.formats.registry import ReadOptions

TracedModel = Model | ModelShape
"""The path of a pack or a source, an open pack, or a shape."""


def shape_of(model: TracedModel) -> ModelShape:
    """Return the shape of a model: the layers with experts, their numbers, and their bytes.

    `model` is a pack's directory, any shard of a GGUF, its folder or a list of all shards, or an
    open pack. Raises SourceError or PackError for faults in the model, RequestError without a path.
    """
    if isinstance(model, ModelShape):
        return model
    with pack_or_source(model) as named:
        if isinstance(named, Pack):
            return named.shape
        return shape_of_source(named, find_experts(named))


def options_of(options: ReadOptions, model: TracedModel | None) -> ReadOptions:
    """Return options with the shape of a model, if there is one. Raises as `shape_of`."""
    return options if model is None else options._replace(shape=shape_of(model))
