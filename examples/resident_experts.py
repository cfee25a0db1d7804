"""Compute with experts where moepack keeps them in memory.

    python resident_experts.py model.moepack MEMORY LAYER EXPERT...

MEMORY is a size, such as 8GiB or 25%.
"""

import sys

import xxhash

import moepack


def main() -> None:
    path, memory, layer, *experts = sys.argv[1:]
    with moepack.ExpertCache(path, memory) as cache:
        # For each token, when the layer's router has selected: what is missing is read.
        routed = list(map(int, experts))
        for expert, parts in zip(routed, cache.use(int(layer), routed), strict=True):
            for name, view in parts.items():  # np.frombuffer(view, np.uint8) copies nothing
                print(
                    f"layer {layer} expert {expert} {name}: xxh3:{xxhash.xxh3_64_hexdigest(view)}"
                )


if __name__ == "__main__":
    main()
