"""Experts as PyTorch tensors: while those of one layer are used, those of the next are read.

    python pytorch_experts.py model.moepack EXPERT...

There are two halves of pinned memory, with a tensor for each part of each expert. One read brings
an expert into its tensors, at the addresses from which the GPU copies them. The experts given are
read in every layer, as if each router had selected them; a real router selects after the layer
before, so that what is read ahead is a guess.
"""

import sys
from collections.abc import Iterator, Sequence

import gguf
import torch
import xxhash

import moepack

PAGE = 4096

Parts = dict[str, torch.Tensor]  # the bytes of an expert's parts, by their names


def pinned(length: int) -> torch.Tensor:
    """Return bytes that start on a page, as direct reads do; pinned if there is a GPU."""
    tensor = torch.empty(length + PAGE, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    start = -tensor.data_ptr() % PAGE
    return tensor[start : start + length]


class ExpertStream:
    """Reads the experts of one layer after another, one layer ahead."""

    def __init__(self, pack: moepack.Pack, expert_count: int) -> None:
        self.pack = pack
        self.reader = pack.reader()
        longest: dict[str, int] = {}
        for layer in pack.layers:
            for part in pack.parts(layer):
                longest[part.name] = max(longest.get(part.name, 0), part.length)
        self.halves = [
            [{name: pinned(longest[name]) for name in longest} for _ in range(expert_count)]
            for _ in range(2)
        ]

    def layers(self, experts: Sequence[int]) -> Iterator[tuple[int, int, Parts]]:
        """Yield (layer, expert, parts); the parts are valid until the next layer's first expert."""
        layers = self.pack.layers
        batch, places = self._begin(0, experts)
        for number, layer in enumerate(layers):
            following = self._begin(number + 1, experts) if number + 1 < len(layers) else None
            with batch:
                for expert in batch.completions():  # as the drive delivers them
                    yield layer, expert.expert, places[expert.number]
            if following:
                batch, places = following

    def _begin(self, number: int, experts: Sequence[int]) -> tuple[moepack.Batch, list[Parts]]:
        layer = self.pack.layers[number]
        lengths = {part.name: part.length for part in self.pack.parts(layer)}
        places = [
            {name: half[name][:length] for name, length in lengths.items()}
            for half in self.halves[number % 2][: len(experts)]
        ]
        keys = [(layer, expert) for expert in experts]
        into = [{name: part.numpy() for name, part in parts.items()} for parts in places]
        return self.reader.submit(keys, into=into), places


def dequantized(data: torch.Tensor, type_id: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of a part, float32 [rows, columns].

    An engine copies the bytes to its GPU, `data.to("cuda", non_blocking=True)`, and computes with
    them there. It must not read into the same half again until that copy has ended: record a
    `torch.cuda.Event` behind it.
    """
    columns, rows = (*shape, 1, 1)[:2]
    array = data.numpy().reshape(rows, -1)
    values = gguf.quants.dequantize(array, gguf.GGMLQuantizationType(type_id))
    return torch.from_numpy(values.reshape(rows, columns))


def main() -> None:
    path, *experts = sys.argv[1:]
    with moepack.open(path) as pack:
        stream = ExpertStream(pack, len(experts))
        for layer, expert, parts in stream.layers([int(expert) for expert in experts]):
            for part in pack.parts(layer):
                weights = dequantized(parts[part.name], part.type_id, part.shape)
                digest = xxhash.xxh3_64_hexdigest(weights.numpy())
                shape = " x ".join(map(str, weights.shape))
                print(f"layer {layer} expert {expert} {part.name}: {shape}, xxh3:{digest}")


if __name__ == "__main__":
    main()
