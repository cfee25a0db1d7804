"""The headline of a report: in one line, the common cause of its findings."""

from collections.abc import Sequence

from moepack.common.escaping import shorten
from moepack.common.sizes import count_text
from moepack.pack.format.manifest import Manifest
from moepack.pack.verifying.comparison import SourceComparison
from moepack.pack.verifying.report import Finding

_SHOWN_NAMES = 3
_DAMAGE = ("file", "digest", "padding")
"""The kinds of findings that are damage."""
_OTHERS = ("gguf-py", "mirror")
"""The kinds of findings that count only if there are no others."""
_WRITER = "a mistake of the program that wrote it"


def write(
    findings: Sequence[Finding],
    described: Manifest,
    comparison: SourceComparison | None,
    *,
    is_all: bool,
) -> str | None:
    """Return the headline, None without findings; `is_all` if all bytes were looked at."""
    ours = [finding for finding in findings if finding.kind not in _OTHERS]
    kinds = {finding.kind for finding in ours or findings}
    if not kinds:
        return None
    if kinds == {"mirror"}:
        return "the mirror is damaged, the pack itself is not: mirror it again"
    if not ours:
        return "gguf-py reads another source than moepack does"
    if comparison is not None and comparison.is_another_model:
        return _another_model(comparison)
    if "index" in kinds:
        return "a damaged file: index.bin"
    if "manifest" in kinds and described.digest_matches:
        return "index.bin and manifest.json do not belong together"
    if "manifest" in kinds:
        return "a damaged file: manifest.json"
    if damage := [finding for kind in _DAMAGE for finding in ours if finding.kind == kind]:
        return _damaged(damage)
    return _of_contents(ours, comparison, is_all=is_all)


def _of_contents(
    findings: Sequence[Finding], comparison: SourceComparison | None, *, is_all: bool
) -> str:
    """Return the headline of a pack that is undamaged, but wrong or of another source."""
    kinds = {finding.kind for finding in findings}
    if comparison is not None and comparison.is_split_otherwise:
        return _split_otherwise(findings, comparison, is_all=is_all)
    if comparison is not None and comparison.changed_headers:
        return f"these shards were changed since packing: {_names(comparison.changed_headers)}"
    if kinds & {"record", "rank"}:
        return f"the index breaks the rules of the format: {_WRITER}"
    if kinds == {"bytes"}:
        if comparison is not None and not all(f.has_digests for f in comparison.pack.index.files):
            return (
                "the source has other bytes than the shards of the index: without digests, "
                "nobody knows which of them were changed"
            )
        return (
            "the source has other bytes, though the pack's digests are right: the shards were "
            "changed since packing, or packed wrongly"
        )
    if kinds == {"source"}:
        return "these shards were changed since packing, by their SHA-256"
    return f"the index does not say what the source holds: {_WRITER}"


def _another_model(comparison: SourceComparison) -> str:
    witness, entry = comparison.witness, comparison.pack.manifest.source
    ours = _model(entry.name, entry.architecture, len(entry.shards))
    theirs = _model(
        witness.text("general.name"), witness.text("general.architecture"), len(witness.shards)
    )
    if ours == theirs:
        return f"this is another version of the model: {theirs}, in other types or shapes"
    return f"this is another model: {theirs}; the pack was made from {ours}"


def _model(name: str | None, architecture: str | None, shard_count: int) -> str:
    shards = count_text(shard_count, "shard")
    return f"{shorten(name or 'a model without a name')} ({shorten(architecture or '–')}, {shards})"


def _split_otherwise(
    findings: Sequence[Finding], comparison: SourceComparison, *, is_all: bool
) -> str:
    """Tell shards that differ from tensors that differ: headers may, tensors not."""
    other = {"bytes", "missing", "surplus", "shape"}
    is_same = is_all and not any(f.kind in other and (f.part or f.tensor) for f in findings)
    subject = "the same tensors, split otherwise" if is_same else "the source is split otherwise"
    shards = count_text(len(comparison.witness.shards), "shard")
    return f"{subject}: {shards}, packed from {len(comparison.pack.manifest.source.shards):,}"


def _damaged(findings: Sequence[Finding]) -> str:
    names = list(dict.fromkeys(f.file for f in findings if f.file is not None))
    count = len({(f.file, f.offset) for f in findings})
    places = "" if count == 1 else f", in {count:,} places"
    return f"{'a damaged file' if len(names) == 1 else 'damaged files'}: {_names(names)}{places}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    hidden = len(names) - _SHOWN_NAMES
    return f"{shown} and {hidden:,} more" if hidden > 0 else shown
