"""Models as no fixture is: what a GGUF may be, and few are. Each is written into a folder."""

from collections.abc import Callable
from pathlib import Path

from tests.support.gguf_builder import (
    F32,
    GgufBuilder,
    TensorSpec,
    moe,
    split,
    write_shards,
)

Build = Callable[[], list[GgufBuilder]]


def write(name: str, folder: Path) -> list[Path]:
    """Write the model `name` into the new folder; return its shards."""
    folder.mkdir()
    shards = MODELS[name]()
    if len(shards) == 1:
        return [shards[0].write(folder / "model.gguf")]
    return write_shards(shards, folder)


def legacy() -> GgufBuilder:
    """Build a model with a tensor for each expert, as before April 2024."""
    layers, experts = 2, 4
    builder = moe((), architecture="llama", block_count=layers, experts=experts)
    for layer in range(layers):
        for expert in range(experts):
            for name, dims in (("gate", (64, 32)), ("up", (64, 32)), ("down", (32, 64))):
                builder.tensor(f"blk.{layer}.ffn_{name}.{expert}.weight", dims, F32, 4 * dims[0])
    return builder


def _legacy_shards() -> list[GgufBuilder]:
    return split(legacy(), 5)  # the experts of a layer lie in several shards


def _padded() -> list[GgufBuilder]:
    builder = moe((0, 1), ne=(7, 5), type_id=F32, block=(1, 4))
    builder.padding = 0xA5
    return split(builder, 4)


def _first_without_tensors() -> list[GgufBuilder]:
    shards = split(moe((0, 1)), 5)
    first = GgufBuilder(metadata=list(shards[0].metadata))
    shards[0].metadata = []
    for number, shard in enumerate([first, *shards]):
        total = sum(len(shard.tensors) for shard in shards)
        shard.put("split.no", "u16", number).put("split.count", "u16", len(shards) + 1)
        shard.put("split.tensors.count", "i32", total)
    return [first, *shards]


def _with_empty_tensors() -> list[GgufBuilder]:
    builder = GgufBuilder().tensor("nothing.first", (0,), F32, 0)
    whole = moe((0, 1))
    builder.metadata = whole.metadata
    builder.tensors += whole.tensors
    builder.tensors.insert(4, TensorSpec("nothing.between", (4, 0), F32, b""))
    builder.tensors.insert(5, TensorSpec("nothing.again", (0, 4), F32, b""))
    return [builder.tensor("nothing.last", (0,), F32, 0)]


_UNKNOWN = 199


def _unknown_types() -> list[GgufBuilder]:
    builder = moe((0, 1), type_id=_UNKNOWN)
    return [builder.tensor("strange.weight", (64, 128), _UNKNOWN, 7)]


def _odd_names() -> list[GgufBuilder]:
    builder = moe((0,))
    names = ("Größe.世界", "e\u0301 is not \u00e9", "\u202egnp.weight", "🦙" * 15, "a b\n\t'\"")
    for name in names:
        builder.tensor(name, (8,), F32, 32)
    return [builder]


def _long_header() -> list[GgufBuilder]:
    builder = moe((0, 1))
    words = [f"word {number} {'x' * 700}" for number in range(2000)]
    return split(builder.put("tokenizer.ggml.tokens", "arr:str", words), 4)


def _aligned(alignment: int) -> Build:
    def build() -> list[GgufBuilder]:
        builder = moe((0, 1)).put("general.alignment", "u32", alignment)
        builder.alignment = alignment
        builder.tensor("odd.weight", (3,), F32, 12).tensor("last.weight", (5,), F32, 20)
        return [builder]

    return build


MODELS: dict[str, Build] = {
    "legacy": _legacy_shards,
    "padded": _padded,
    "first without tensors": _first_without_tensors,
    "empty tensors": _with_empty_tensors,
    "unknown types": _unknown_types,
    "odd names": _odd_names,
    "long header": _long_header,
    "aligned to 64": _aligned(64),
    "aligned to 4096": _aligned(4096),
}
