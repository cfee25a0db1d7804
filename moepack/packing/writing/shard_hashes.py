"""The check that a resumed pack of a remote source has the bytes that the hub states.

While a model is copied from its start to its end, its bytes pass by in order and are hashed. If
files of an interrupted run are taken over, they do not: the shards are read back from the pack.
"""

from operator import attrgetter
from pathlib import Path

from moepack.pack.reading.shard_map import ShardMap
from moepack.pack.verifying.shard_sha256 import sha256_of_restored
from moepack.packing.plan.plan import Plan
from moepack.storage.extents import Extent
from moepack.storage.inputs import Inputs


def check_shard_hashes(plan: Plan, inputs: Inputs, folder: Path, threads: int) -> None:
    """Raise SourceError if the data files that `plan` describes hold a shard with another SHA-256.

    `inputs` are the shards. Does nothing if not all of their bytes are in the pack. Raises OSError,
    and EOFError for a file that ends early.
    """
    if not plan.is_whole or plan.layers is not None:
        return
    files = plan.new_files()
    pieces: list[list[Extent]] = [[] for _ in inputs.paths]
    for number, file in enumerate(files):
        for extent in file.extents():
            piece = Extent(extent.input_offset, extent.length, number, extent.offset)
            pieces[extent.input].append(piece)
    shards = [
        ShardMap(str(path), inputs.length(number), tuple(sorted(own, key=attrgetter("offset"))))
        for number, (path, own) in enumerate(zip(inputs.paths, pieces, strict=True))
    ]
    paths = [folder / file.name for file in files]
    hashes = sha256_of_restored(paths, shards, threads, lambda done, total: None)
    for number, sha256 in enumerate(hashes):
        inputs.check_sha256(number, sha256)
