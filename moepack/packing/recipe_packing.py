"""Pack a model by a recipe in one call."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from moepack.common.errors import RequestError
from moepack.common.paths import AnyPath, PathOrPaths
from moepack.common.phases import Progress
from moepack.common.remote_path import is_remote
from moepack.packing.plan.pack_summary import PackSummary, from_pack
from moepack.packing.writing import packer
from moepack.packing.writing.recipe import RecipePack, load_recipe
from moepack.packing.writing.target_directory import check_as_if_packing
from moepack.source.shards import open_source


def pack_by_recipe(
    source: PathOrPaths,
    recipe: AnyPath,
    target: AnyPath,
    *,
    resume: bool = False,
    threads: int = packer.DEFAULT_THREADS,
    progress: Progress | None = None,
) -> PackSummary:
    """Pack a model into the directory `target` by the recipe of a pack: the same, to the byte.

    `source` is the model that the pack was made of, as for `pack_model`, here or elsewhere. Each
    part is compared with its digest as it is copied. `resume` continues an interrupted run.

    Raises PackError for a damaged recipe, SourceError for another model, and as `pack_model`.
    """
    if is_remote(target):
        hint = "choose a folder of this machine"
        raise RequestError("a recipe is not carried out in a store", path=target, hint=hint)
    loaded = load_recipe(recipe)
    pack = RecipePack(loaded, open_source(source))
    length = sum(file.length for file in pack.files.values()) + pack.index_length
    check_as_if_packing(Path(target), length, resume)
    began = time.monotonic()
    files = packer.pack(pack, target, resume=resume, threads=threads, progress=progress)
    return replace(
        from_pack(target),
        written_length=files.length,
        resumed_file_count=files.resumed_count,
        seconds=time.monotonic() - began,
    )
