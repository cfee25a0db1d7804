"""The model that a trace was taken on: its shape, which says what routers can have chosen."""

from moepack.paths import PathOrPaths
from moepack.reading.directory import named_pack
from moepack.reading.pack import Pack
from moepack.shape import ModelShape
from moepack.source.experts import find_experts
from moepack.source.experts import shape_of as shape_of_source
from moepack.source.shards import open_source
from moepack.trace.formats.registry import ReadOptions

TracedModel = PathOrPaths | Pack | ModelShape
"""The path of a pack or a source, an open pack, or a shape."""


def shape_of(model: TracedModel) -> ModelShape:
    """Return the shape of a model: which layers have experts, how many, of how many bytes.

    `model` is a pack's directory, any shard of a GGUF, its folder or a list of all shards, or an
    open pack, of which it is what the pack holds. Raises SourceError or PackError for what is at
    fault, RequestError for no path at all.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Pack):
        return model.shape
    if (path := named_pack(model)) is not None:
        with Pack(path) as pack:
            return pack.shape
    source = open_source(model)
    return shape_of_source(source, find_experts(source))


def options_of(options: ReadOptions, model: TracedModel | None) -> ReadOptions:
    """Return options with the shape of a model, if there is one. Raises as `shape_of`."""
    return options if model is None else options._replace(shape=shape_of(model))
