"""Write manifest.json from a plan and its index (FORMAT.md, "The manifest")."""

import hashlib

from moepack.pack.format import manifest
from moepack.pack.format.source_entry import SourceEntry
from moepack.packing.plan.plan import Plan
from moepack.version import TOOL


def encode(
    plan: Plan,
    described: SourceEntry,
    index: bytes,
    *,
    strong: bool = False,
) -> bytes:
    """Return the bytes of the manifest of the pack that `plan` describes, with that index.

    With `strong` it has the SHA-256 of the index.
    """
    entry = manifest.describe_index(index)
    if strong:
        entry = entry._replace(sha256=hashlib.sha256(index).hexdigest())
    return manifest.encode(
        manifest.Manifest(
            tool=TOOL,
            is_whole=plan.is_whole,
            source=described,
            layout=plan.layout.to_json(),
            hotness=plan.hotness_to_json(),
            layers=None if plan.layers is None else list(plan.layers),
            index_entry=entry,
            files=tuple(manifest.FileEntry(file.name, file.length) for file in plan.new_files()),
        )
    )
