"""What the findings of a verification have in common, in one line: whose fault it is."""

from collections.abc import Iterable

from moepack.escaping import short
from moepack.format.manifest import Manifest
from moepack.verifying.comparison import Comparison
from moepack.verifying.report import Finding

_SHOWN_NAMES = 3
_DAMAGE = ("file", "digest", "stored", "codec", "padding")
"""The kinds of findings that tell of damage."""


def write(
    findings: Iterable[Finding],
    described: Manifest,
    comparison: Comparison | None,
    *,
    is_all: bool,
) -> str | None:
    """Write the headline; None where there are no findings. `is_all`: all bytes were looked at.

    What gguf-py reads, and the mirror, count only where moepack found nothing else.
    """
    found = list(findings)
    ours = [finding for finding in found if finding.kind not in ("gguf-py", "mirror")]
    if found and not ours and all(finding.kind == "mirror" for finding in found):
        return "the mirror is damaged, the pack itself is not: mirror it again"
    if ours:
        return _write(ours, described, comparison, is_all=is_all)
    return "gguf-py reads another source than moepack does" if found else None


def _write(
    found: list[Finding],
    described: Manifest,
    comparison: Comparison | None,
    *,
    is_all: bool,
) -> str:
    of_kind = {finding.kind: [] for finding in found}  # type: dict[str, list[Finding]]
    for finding in found:
        of_kind[finding.kind].append(finding)
    if comparison is not None and comparison.is_another_model:
        return _another_model(described, comparison)
    damaged = [f for kind in _DAMAGE for f in of_kind.get(kind, [])]
    for kind in ("index", "manifest"):
        if kind in of_kind:
            return _metadata(kind, of_kind[kind])
    if damaged:
        return _damaged(damaged)
    if comparison is not None and comparison.is_split_otherwise:
        return _split_otherwise(found, described, comparison, is_all=is_all)
    if comparison is not None and comparison.changed_headers:
        return f"these shards were changed since packing: {_names(comparison.changed_headers)}"
    if of_kind.keys() & {"record", "rank"}:
        return "the index breaks the rules of the format: a mistake of the program that wrote it"
    if of_kind.keys() == {"bytes"}:
        if comparison is not None and not all(f.has_digests for f in comparison.index.files):
            return "the source has other bytes than the shards of the index: without digests, "\
                "nobody knows which of them were changed"  # fmt: skip
        return "the source has other bytes, though the pack's digests are right: the shards were "\
            "changed since packing, or packed wrongly"  # fmt: skip
    if of_kind.keys() == {"source"}:
        return "these shards were changed since packing, by their SHA-256"
    return "the index does not say what the source holds: a mistake of the program that wrote it"


def _another_model(described: Manifest, comparison: Comparison) -> str:
    witness, entry = comparison.witness, described.source
    ours = _model(entry.name, entry.architecture, len(entry.shards))
    theirs = _model(
        witness.text("general.name"), witness.text("general.architecture"), len(witness.shards)
    )
    if ours == theirs:
        return f"this is another version of the model: {theirs}, in other types or shapes"
    return f"this is another model: {theirs}; the pack was made from {ours}"


def _split_otherwise(
    findings: list[Finding], described: Manifest, comparison: Comparison, *, is_all: bool
) -> str:
    """Say whether only the shards differ, or also what is in them: headers may, tensors not."""
    other = {"bytes", "missing", "surplus", "shape"}
    is_same = is_all and not any(f.kind in other and (f.part or f.tensor) for f in findings)
    what = "the same tensors, split otherwise" if is_same else "the source is split otherwise"
    shards = _shards(len(comparison.witness.shards))
    return f"{what}: {shards}, packed from {len(described.source.shards):,}"


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count:,} shards"


def _model(name: str | None, architecture: str | None, shard_count: int) -> str:
    shards = _shards(shard_count)
    return f"{short(name or 'a model without a name')} ({short(architecture or '–')}, {shards})"


def _metadata(kind: str, findings: list[Finding]) -> str:
    """Tell damage of the index or the manifest from files that do not belong together."""
    file = "index.bin" if kind == "index" else "manifest.json"
    is_torn = kind == "manifest" and all("digest differs" not in f.message for f in findings)
    if is_torn:
        return "index.bin and manifest.json do not belong together"
    return f"a damaged file: {file}"


def _damaged(findings: list[Finding]) -> str:
    if {finding.kind for finding in findings} == {"codec"}:
        what = "parts cannot be decoded, though what is stored of them is as it was written"
        return f"{what}: a mistake of the program that wrote it"
    names = list(dict.fromkeys(f.file for f in findings if f.file is not None))
    count = len({(f.file, f.offset) for f in findings})
    places = "" if count == 1 else f", in {count:,} places"
    return f"{'a damaged file' if len(names) == 1 else 'damaged files'}: {_names(names)}{places}"


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    hidden = len(names) - _SHOWN_NAMES
    return f"{shown} and {hidden:,} more" if hidden > 0 else shown
