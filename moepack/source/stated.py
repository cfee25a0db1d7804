"""The numbers of experts in a model's metadata, compared with its tensors.

The tensor table decides. A number that the metadata lacks, or gives as something else, is unknown;
if the tensors refute it, the source is at fault: no engine runs such a model.
"""

from typing import NoReturn

from moepack.common.errors import SourceError
from moepack.common.shape import CHUNK_FAMILY
from moepack.source.shards import Source

_OF_VALUES = "attn_v_exps"


def expert_count(source: Source, layer: int, family: str) -> int | None:
    """Return the number of a family's experts that the metadata states for a layer with some.

    None if it states no number. Raises SourceError if it states 0.
    """
    key = "attention.value_expert_count" if family == _OF_VALUES else "expert_count"
    count = _of_layer(source, key, layer)
    if count is None:
        return None
    if count < 1:
        _fail(source, key, f"layer {layer} has experts, and it states none", "1 or more", count)
    if family != CHUNK_FAMILY:
        return count
    group = source.model_value("experts_per_group")
    return count // group if type(group) is int and group > 0 else None


def experts_used(source: Source, layer: int, family: str, expert_count: int) -> int | None:
    """Return the number of a family's `expert_count` experts that a token uses in a layer.

    Of chunk experts it is the most, since routed experts share them. None if the metadata does not
    state it. Raises SourceError if it states 0, or more than there are.
    """
    key = "attention.value_expert_used_count" if family == _OF_VALUES else "expert_used_count"
    used = _of_layer(source, key, layer)
    if used is None:
        return None
    if family == CHUNK_FAMILY and used > 0:
        return min(used, expert_count)
    if not 1 <= used <= expert_count:
        problem = f"a token cannot use so many experts of layer {layer}"
        _fail(source, key, problem, f"1 to {expert_count:,}", used)
    return used


def check_mtp_layers(source: Source) -> None:
    """Raise SourceError if all layers or more are stated to be for multi-token prediction."""
    blocks = source.model_value("block_count")
    predicted = source.model_value("nextn_predict_layers")
    if type(blocks) is int and type(predicted) is int and not 0 <= predicted < blocks:
        problem = "not so many layers can be for multi-token prediction"
        _fail(source, "nextn_predict_layers", problem, f"fewer than {blocks:,}", predicted)


def _of_layer(source: Source, key: str, layer: int) -> int | None:
    """Return a number of the metadata, which may have one for each layer."""
    value = source.model_value(key)
    if isinstance(value, tuple):
        value = value[layer] if layer < len(value) else None
    return value if type(value) is int else None


def _fail(source: Source, key: str, problem: str, expected: str, actual: int) -> NoReturn:
    path, place = source.shards[0].path, f"key '{source.architecture}.{key}'"
    hint = "the metadata of this file is wrong, and no engine runs it: convert or download it again"
    raise SourceError(problem, path=path, place=place, expected=expected, found=actual, hint=hint)
