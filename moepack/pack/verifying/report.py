"""The outcome of a verification: findings, a headline, counts and lengths."""

from typing import Any, NamedTuple

from moepack.common.errors import MoepackError


class Finding(NamedTuple):
    """One thing that is wrong.

    `kind` is stable and machine-readable (docs/commands/verify.md); `offset` counts from the
    start of `file`. What does not apply is None.
    """

    kind: str
    message: str
    layer: int | None = None
    expert: int | None = None
    part: str | None = None
    tensor: str | None = None
    file: str | None = None
    offset: int | None = None

    @property
    def place(self) -> str:
        """Where it is, in words; empty if it concerns the whole pack."""
        fields = (
            ("layer", self.layer),
            ("expert", self.expert),
            ("", self.part),
            ("tensor", self.tensor),
            ("in", self.file),
            ("at byte", None if self.offset is None else f"{self.offset:,}"),
        )
        return " ".join(f"{name} {value}".strip() for name, value in fields if value is not None)

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.kind, self.place, self.message)))


class Report(NamedTuple):
    """The outcome of a verification: lengths in bytes, all findings in a stable order.

    `passed` is false if anything is wrong, and None if nothing was found but not all was looked at:
    `not_looked_at` lists the rest in words. `headline` says what the findings have in common, None
    without findings.

    `blob_count`, `part_count` and `tensor_count` are those in the index, `checked_blob_count` and
    `checked_tensor_count` those of them whose bytes were looked at; `checked_layers` are the layers
    all of whose blobs were. `read_length` is the bytes read of the `data_length` bytes of the
    pack's files, `compared_length` the bytes of the source that were compared with them, None
    without a source. `sha256_count` is the number of shards with the SHA-256 in the manifest,
    `gguf_py_length` the bytes of the pack that were compared with gguf-py's; None if that was not
    requested. `mirror_length` is the bytes read of the pack's mirror, None if none is read.
    `compared_with` names what they were compared with.
    """

    passed: bool | None
    headline: str | None
    path: str
    findings: tuple[Finding, ...]
    layers: tuple[int, ...] = ()
    checked_layers: tuple[int, ...] = ()
    blob_count: int = 0
    part_count: int = 0
    tensor_count: int = 0
    checked_blob_count: int = 0
    checked_tensor_count: int = 0
    read_length: int = 0
    data_length: int = 0
    compared_length: int | None = None
    sha256_count: int | None = None
    gguf_py_length: int | None = None
    not_looked_at: tuple[str, ...] = ()
    mirror_length: int | None = None
    compared_with: str = "the source"


class Findings:
    """Collects findings."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def add(self, kind: str, message: str, **where: Any) -> None:
        """Add a finding; `where` are its other fields."""
        self.all.append(Finding(kind, message, **where))

    def add_error(self, kind: str, error: MoepackError, **where: Any) -> None:
        """Add the message of an error without its file, which is among the fields `where`."""
        bare = MoepackError(
            error.problem, place=error.place, expected=error.expected, found=error.found
        )
        self.add(kind, str(bare), **where)

    def drop_consequences(self) -> None:
        """Drop findings about padding if records that are wrong or missing may explain them."""
        kinds = {finding.kind for finding in self.all}
        if "record" in kinds or "missing" in kinds:
            self.all = [finding for finding in self.all if finding.kind != "padding"]

    def in_order(self) -> tuple[Finding, ...]:
        """Return all: those of the pack as such, of tensors, then by layer and expert."""

        def key(finding: Finding) -> tuple[int, int, str, str, str, int, str]:
            layer = -1 if finding.layer is None else finding.layer
            expert = -1 if finding.expert is None else finding.expert
            names = (finding.part or "", finding.tensor or "", finding.file or "")
            return layer, expert, *names, finding.offset or 0, finding.kind

        return tuple(sorted(self.all, key=key))
