"""A cache of experts for MLX: the hottest first, then what the routers select.

    python mlx_experts.py model.moepack BUDGET LAYER:EXPERT...

An expert stays in memory as it is in the pack, which the GPU of a Mac can read as well, and becomes
numbers when it is used. BUDGET is a size, such as 8GiB or 25%.
"""

import sys
from collections import OrderedDict

import gguf
import mlx.core as mx
import numpy as np
import xxhash

import moepack

Key = tuple[int, int]  # layer, expert
Parts = dict[str, mx.array]  # the bytes of an expert's parts, by their names


class ExpertCache:
    """Experts within a budget of bytes; the least recently used one is evicted."""

    def __init__(self, pack: moepack.Pack, budget: str) -> None:
        self.pack = pack
        self.reader = pack.reader()
        self.experts: OrderedDict[Key, Parts] = OrderedDict()
        hottest = [tuple(key) for key in pack.hottest(budget)]
        self.budget = sum(self._length(key) for key in hottest)
        self.read(hottest[::-1])  # the hottest of all last: it is evicted last

    def read(self, keys: list[Key]) -> None:
        """Read experts that are missing, all at once; call it as soon as a router has selected."""
        missing = [key for key in dict.fromkeys(keys) if key not in self.experts]
        for expert in self.reader.read_many(missing):
            key = (expert.layer, expert.expert)
            self.experts[key] = {
                part.name: mx.array(np.frombuffer(expert.part(part.name), np.uint8))
                for part in self.pack.parts(expert.layer)
            }
        for key in keys:
            self.experts.move_to_end(key)
        length = sum(self._length(key) for key in self.experts)
        while length > self.budget and len(self.experts) > len(set(keys)):
            evicted, _ = self.experts.popitem(last=False)
            length -= self._length(evicted)

    def get(self, key: Key) -> Parts:
        """Return the bytes of an expert's parts."""
        if key not in self.experts:
            self.read([key])
        self.experts.move_to_end(key)
        return self.experts[key]

    def _length(self, key: Key) -> int:
        return self.pack.hotness(*key).length


def dequantized(data: mx.array, type_id: int, shape: tuple[int, ...]) -> mx.array:
    """Return the values of a part, float32 [rows, columns]: of Q8_0 on the GPU, else by gguf-py."""
    columns, rows = (*shape, 1, 1)[:2]
    if type_id == gguf.GGMLQuantizationType.Q8_0:
        # Blocks of a float16 and the 32 bytes that it multiplies.
        blocks = data.reshape(-1, 34)
        scales = mx.contiguous(blocks[:, :2]).view(mx.float16).astype(mx.float32)
        numbers = mx.contiguous(blocks[:, 2:]).view(mx.int8).astype(mx.float32)
        return (scales * numbers).reshape(rows, columns)
    array = np.array(data).reshape(rows, -1)
    values = gguf.quants.dequantize(array, gguf.GGMLQuantizationType(type_id))
    return mx.array(values.reshape(rows, columns))


def main() -> None:
    path, budget, *routed = sys.argv[1:]
    with moepack.open(path) as pack:
        cache = ExpertCache(pack, budget)
        print(f"{len(cache.experts)} experts are loaded")
        for text in routed:
            layer, expert = map(int, text.split(":"))
            word = "hit" if (layer, expert) in cache.experts else "read"
            parts = cache.get((layer, expert))
            for part in pack.parts(layer):
                weights = np.array(dequantized(parts[part.name], part.type_id, part.shape))
                digest = xxhash.xxh3_64_hexdigest(weights)
                shape = " x ".join(map(str, weights.shape))
                print(f"{word} layer {layer} expert {expert} {part.name}: {shape}, xxh3:{digest}")


if __name__ == "__main__":
    main()
