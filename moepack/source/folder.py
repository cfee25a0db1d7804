"""The model in a folder: its shards lie there, or one level down, as in folders of quantisations.

Facts of the cache that huggingface_hub keeps: a repository is the folder `models--OWNER--NAME`;
`snapshots/COMMIT/` in it holds the repository's files as links into `blobs/`, and `refs/main` the
commit that the branch was last seen at. Only what was downloaded of a commit is in its snapshot.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from moepack.errors import SourceError
from moepack.escaping import shell_word
from moepack.source import gguf_header
from moepack.source.gguf_header import Value
from moepack.storage.pack_files import is_pack

SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.DOTALL)
NOT_MODELS = {
    "imatrix": "an importance matrix, not a model",
    "adapter": "an adapter (LoRA), not a model",
    "mmproj": "a multimodal projector, not a model",
}
"""What `general.type` may say that a GGUF is."""

HINTS = {
    "imatrix": "it says which experts are hot: moepack pack MODEL.gguf --hotness {} -o NAME",
    "adapter": "name its model, and give it to llama-server behind --: -m {{}} --lora {}",
    "mmproj": "name its model, and give it to llama-server behind --: -m {{}} --mmproj {}",
}
"""What each of them is for; `{}` is its path."""

_SHOWN_MODELS = 20
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_in(folder: Path) -> Path:
    """Return a file of the one model that a folder names.

    What lies in the folder itself comes before what lies one level down. Raises SourceError where
    there is none, or several; OSError where the folder cannot be read.
    """
    files: list[Path] = []
    for places in _generations(folder):
        found = _one_of_each(path for place in places for path in sorted(place.glob("*.gguf")))
        models = [path for path in found if _is_model(path)]
        if len(models) > 1:
            raise _several(folder, models)
        if models:
            return models[0]
        files += found
        files += [piece for place in places for piece in sorted(place.glob("*.gguf[.-]*"))]
    if files:
        return files[0]  # reading it says what it is
    raise _none(folder)


def _generations(folder: Path) -> Iterator[list[Path]]:
    """Yield the places to look in, those that count more first."""
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
    held = folder / "snapshots"
    if not held.is_dir():
        return []
    every = sorted(path for path in held.iterdir() if path.is_dir())
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return [every]
    main = [path for path in every if _COMMIT.fullmatch(commit) and path.name == commit]
    return [main, every] if main else [every]


def _one_of_each(paths: Iterable[Path]) -> list[Path]:
    """Keep one file of each model, and one of the snapshots that share its bytes."""
    models: dict[tuple[Path, str], Path] = {}
    for path in paths:
        match = SHARD_NAME.match(path.name)
        name = f"{match['prefix']}-of-{match['count']}" if match else path.name
        models.setdefault((path.parent, name), path)
    return list({os.path.realpath(path): path for path in models.values()}.values())


def _is_model(path: Path) -> bool:
    """Say whether a file is a model, and not an imatrix or projector; a broken one may be."""
    try:
        metadata = gguf_header.read(path).metadata
    except SourceError:
        return True
    kind = metadata.get("general.type", Value("str", "model")).data
    architecture = metadata.get("general.architecture", Value("str", "")).data
    return kind not in NOT_MODELS and architecture != "clip"


def _several(folder: Path, models: list[Path]) -> SourceError:
    error = SourceError(
        "several models in this folder",
        path=folder,
        found=", ".join(str(path.relative_to(folder)) for path in models),
        hint="name one file of the model that you mean:",
    )
    for path in models[:_SHOWN_MODELS]:
        error.add_note(f"  {shell_word(str(path))}")
    if len(models) > _SHOWN_MODELS:
        error.add_note(f"  … and {len(models) - _SHOWN_MODELS} more")
    return error


def _none(folder: Path) -> SourceError:
    hint = "name a shard of a model, or the folder that its shards lie in"
    if any(folder.glob("*.safetensors")):
        there = shell_word(str(folder))
        hint = (
            "moepack reads GGUF; llama.cpp's script makes one of safetensors:"
            f" python convert_hf_to_gguf.py {there} --outfile {shell_word(folder.name)}.gguf"
        )
    if is_pack(folder):
        name = shell_word(str(folder))
        shards = shell_word(f"{folder.name.removesuffix('.moepack')}-shards")
        hint = f"name the model that it was made from; moepack restore {name} -o {shards} makes it"
        return SourceError("this is a pack, not a source", path=folder, hint=hint)
    return SourceError("no GGUF in this folder, nor one level down", path=folder, hint=hint)
