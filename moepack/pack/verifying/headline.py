"""The headline of a report: in one line, the common cause of its findings."""

from collections.abc import Sequence

from moepack.common.escaping import shorten
from moepack.common.sizes import count_text
from moepack.pack.format.manifest import Manifest
from moepack.pack.verifying.comparison import SourceComparison
from moepack.pack.verifying.report import Finding
from moepack.pack.verifying.witness import Witness

_SHOWN_NAMES = 3
_DAMAGE = ("file", "digest", "padding")
"""The kinds of findings that are damage."""
_OTHERS = ("gguf-py", "mirror")
"""The kinds of findings that count only if there are no others."""
_OF_CONTENT = ("bytes", "missing", "surplus", "shape")
_WRITER = "a mistake of the program that wrote it"
_OTHER_BYTES = {
    True: "the source has other bytes, though the pack's digests are right: the shards were "
    "changed since packing, or packed wrongly",
    False: "the source has other bytes than the shards of the index: without digests, "
    "nobody knows which of them were changed",
}
"""By whether all bytes of the pack have a digest."""


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
        return _another_model(comparison.witness, described)
    if "index" in kinds:
        return "a damaged file: index.bin"
    if "manifest" in kinds and described.digest_matches:
        return "index.bin and manifest.json do not belong together"
    if "manifest" in kinds:
        return "a damaged file: manifest.json"
    if damage := [finding for kind in _DAMAGE for finding in ours if finding.kind == kind]:
        return _damaged(damage)
    if comparison is not None and comparison.is_split_otherwise:
        shards = count_text(len(comparison.witness.shards), "shard")
        # Headers may differ, tensors may not.
        differ = any(f.kind in _OF_CONTENT and (f.part or f.tensor) for f in ours)
        subject = "the source is" if differ or not is_all else "the same tensors,"
        return f"{subject} split otherwise: {shards}, packed from {len(described.source.shards):,}"
    return _of_contents(kinds, comparison)


def _of_contents(kinds: set[str], comparison: SourceComparison | None) -> str:
    """Return the headline of a pack that is undamaged, but wrong or of another source."""
    if comparison is not None and comparison.changed_headers:
        return f"these shards were changed since packing: {_names(comparison.changed_headers)}"
    if kinds & {"record", "rank"}:
        return f"the index breaks the rules of the format: {_WRITER}"
    if kinds == {"bytes"} and comparison is not None:
        return _OTHER_BYTES[all(file.has_digests for file in comparison.pack.index.files)]
    if kinds == {"source"}:
        return "these shards were changed since packing, by their SHA-256"
    return f"the index does not say what the source holds: {_WRITER}"


def _another_model(witness: Witness, described: Manifest) -> str:
    entry = described.source
    ours = _model(entry.name, entry.architecture, len(entry.shards))
    texts = witness.shards[0].texts
    name, architecture = texts.get("general.name"), texts.get("general.architecture")
    theirs = _model(name, architecture, len(witness.shards))
    if ours == theirs:
        return f"this is another version of the model: {theirs}, in other types or shapes"
    return f"this is another model: {theirs}; the pack was made from {ours}"


def _model(name: str | None, architecture: str | None, shard_count: int) -> str:
    shards = count_text(shard_count, "shard")
    return f"{shorten(name or 'a model without a name')} ({shorten(architecture or '–')}, {shards})"


def _damaged(findings: Sequence[Finding]) -> str:
    names = list(dict.fromkeys(f.file for f in findings if f.file is not None))
    count = len({(f.file, f.offset) for f in findings})
    places = "" if count == 1 else f", in {count:,} places"
    return f"{'a damaged file' if len(names) == 1 else 'damaged files'}: {_names(names)}{places}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    hidden = len(names) - _SHOWN_NAMES
    return f"{shown} and {hidden:,} more" if hidden > 0 else shown
