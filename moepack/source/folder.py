"""The model in a folder: its shards are there, or one level down, as in folders of quantisations.

Facts of the cache that huggingface_hub keeps: a repository is the folder `models--OWNER--NAME`;
`snapshots/COMMIT/` in it has the repository's files as links into `blobs/`, and `refs/main` the
last known commit of the branch. A snapshot has only the files of its commit that were downloaded.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from moepack.common.errors import SourceError
from moepack.common.escaping import shell_word
from moepack.common.pack_files import is_pack
from moepack.source import gguf_header
from moepack.storage.regular_file import read_back

SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.DOTALL)
NOT_MODELS = {
    "imatrix": (
        "an importance matrix, not a model",
        "it says which experts are hot: moepack pack MODEL.gguf --hotness {} -o NAME",
    ),
    "adapter": (
        "an adapter (LoRA), not a model",
        "name its model, and give it to llama-server behind --: -m {{}} --lora {}",
    ),
    "mmproj": (
        "a multimodal projector, not a model",
        "name its model, and give it to llama-server behind --: -m {{}} --mmproj {}",
    ),
}
"""Other kinds of GGUFs by their `general.type`, with a hint; `{}` is the path."""

SHOWN_MODELS = 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_COMMIT = 64


def shard_names(prefix: str, count: int) -> Iterator[str]:
    """Name the shards of a model split into `count`, as llama.cpp does."""
    return (f"{prefix}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))


def model_in(folder: Path) -> Path:
    """Return a file of the one model that a folder names.

    Files in the folder itself come before those one level down. Raises SourceError if there is no
    model, or several; OSError if the folder cannot be read.
    """
    others: list[Path] = []
    for folders in _candidates(folder):
        files = _one_of_each(path for place in folders for path in sorted(place.glob("*.gguf")))
        models = [path for path in files if _is_model(path)]
        if len(models) > 1:
            raise _several(folder, models)
        if models:
            return models[0]
        others += files
        others += [piece for place in folders for piece in sorted(place.glob("*.gguf[.-]*"))]
    if others:
        return others[0]  # reading it raises the error that it deserves
    raise _none(folder)


def _candidates(folder: Path) -> Iterator[list[Path]]:
    """Yield the folders to look in, by falling precedence."""
    for roots in _snapshots(folder) or [[folder]]:
        yield roots
        yield [
            child
            for root in roots
            for child in sorted(root.iterdir())
            if child.is_dir() and not child.name.startswith(".")
        ]


def _snapshots(folder: Path) -> list[list[Path]]:
    """List the snapshots of a repository in the hub's cache: that of the main branch, then all."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return []
    every = sorted(path for path in snapshots.iterdir() if path.is_dir())
    main = [path for path in every if path.name == commit_in_cache(folder, "main")]
    return [main, every] if main else [every]


def commit_in_cache(repository: Path, branch: str) -> str | None:
    """Return the last known commit of a branch of a repository in the hub's cache."""
    try:
        commit = read_back(repository / "refs" / branch, _MAX_COMMIT).decode().strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _one_of_each(paths: Iterable[Path]) -> list[Path]:
    """Keep one file of each model, and one of the snapshots that share its bytes."""
    models: dict[tuple[Path, str], Path] = {}
    for path in paths:
        match = SHARD_NAME.match(path.name)
        name = f"{match['prefix']}-of-{match['count']}" if match else path.name
        models.setdefault((path.parent, name), path)
    return list({os.path.realpath(path): path for path in models.values()}.values())


def _is_model(path: Path) -> bool:
    """Return whether a file is a model, and not an imatrix or projector; a broken one may be."""
    try:
        header = gguf_header.read(path)
    except SourceError:
        return True
    return (
        header.value("general.type") not in NOT_MODELS
        and header.value("general.architecture") != "clip"
    )


def _several(folder: Path, models: list[Path]) -> SourceError:
    names = ", ".join(str(path.relative_to(folder)) for path in models)
    hint = "name one file of the model that you mean:"
    error = SourceError("several models in this folder", path=folder, found=names, hint=hint)
    return with_list(error, [shell_word(str(path)) for path in models])


def with_list(error: SourceError, lines: Sequence[str]) -> SourceError:
    """Return an error with a list behind its hint, which is cut if it is long."""
    for line in lines[:SHOWN_MODELS]:
        error.add_note(f"  {line}")
    if len(lines) > SHOWN_MODELS:
        error.add_note(f"  … and {len(lines) - SHOWN_MODELS} more")
    return error


def _none(folder: Path) -> SourceError:
    name = shell_word(str(folder))
    if is_pack(folder):
        shards = shell_word(f"{folder.name.removesuffix('.moepack')}-shards")
        hint = f"name the model that it was made from; moepack restore {name} -o {shards} makes it"
        return SourceError("this is a pack, not a source", path=folder, hint=hint)
    hint = "name a shard of a model, or the folder that its shards lie in"
    if any(folder.glob("*.safetensors")):
        hint = (
            "moepack reads GGUF; llama.cpp's script makes one of safetensors:"
            f" python convert_hf_to_gguf.py {name} --outfile {shell_word(folder.name)}.gguf"
        )
    return SourceError("no GGUF in this folder, nor one level down", path=folder, hint=hint)
