"""The words in which all examples print the parts of experts."""

from collections.abc import Iterator, Sequence

import moepack
from moepack.common import digest


def parts_of(pack: moepack.Pack, keys: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each part of experts, with the digest of what Python reads."""
    with pack.reader(backend="buffered") as reader:
        for layer, expert in keys:
            for kind in pack.parts(layer):
                xxh3 = digest.xxh3(reader.read(layer, expert, kind.name))
                yield f"layer {layer} expert {expert} {kind.name}: xxh3:{xxh3:016x}"
