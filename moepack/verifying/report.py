"""The outcome of a verification: findings, what they have in common, and how much was looked at."""

from typing import Any, NamedTuple

from moepack.errors import MoepackError


class Finding(NamedTuple):
    """One thing that is wrong.

    `kind` is stable and machine-readable (docs/commands.md, "verify"); `offset` counts from the
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
        """Where it is, in words; empty where it is the whole pack."""
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

    `passed` is false where anything is wrong, and None where nothing was found but not all was
    looked at: `not_looked_at` says in words what. `headline` says what the findings have in common,
    None where there are none.

    `blob_count`, `part_count` and `tensor_count` are what the index lists, `checked_blob_count` and
    `checked_tensor_count` those of them whose bytes were looked at; `checked_layers` are the layers
    all of whose blobs were. `read_length` is the bytes read
    of the `data_length` bytes of the pack's files, and `compared_length` how many bytes of the
    source were compared with them, None where no source was given. `sha256_count` is how many
    shards have the SHA-256 that the manifest states, and `gguf_py_length` how many bytes of the
    pack were compared with what gguf-py reads in the source; None where that was not asked for.
    `mirror_length` is the bytes read of the pack's mirror, None where none is read.
    """

    passed: bool | None
    headline: str | None
    path: str
    findings: tuple[Finding, ...]
    layers: tuple[int, ...]
    checked_layers: tuple[int, ...]
    blob_count: int
    part_count: int
    tensor_count: int
    checked_blob_count: int
    checked_tensor_count: int
    read_length: int
    data_length: int
    compared_length: int | None
    sha256_count: int | None
    gguf_py_length: int | None
    not_looked_at: tuple[str, ...]
    mirror_length: int | None = None


class Findings:
    """Collects findings."""

    def __init__(self) -> None:
        self.all: list[Finding] = []

    def add(
        self,
        kind: str,
        message: str,
        *,
        layer: int | None = None,
        expert: int | None = None,
        part: str | None = None,
        tensor: str | None = None,
        file: str | None = None,
        offset: int | None = None,
    ) -> None:
        """Add one."""
        self.all.append(Finding(kind, message, layer, expert, part, tensor, file, offset))

    def add_error(self, kind: str, error: MoepackError, **where: Any) -> None:
        """Add what an error says; its file is the finding's to name."""
        bare = MoepackError(
            error.problem, place=error.place, expected=error.expected, found=error.found
        )
        self.add(kind, str(bare), **where)

    def drop_consequences(self) -> None:
        """Drop findings of padding that is not zero where records say too little of what it is."""
        kinds = {finding.kind for finding in self.all}
        if "record" in kinds or "missing" in kinds:
            self.all = [finding for finding in self.all if finding.kind != "padding"]

    def in_order(self) -> tuple[Finding, ...]:
        """Return all: those of the pack as such, of tensors, then by layer and expert."""

        def key(finding: Finding) -> tuple[int, int, str, str, str, int]:
            layer = -1 if finding.layer is None else finding.layer
            expert = -1 if finding.expert is None else finding.expert
            names = (finding.part or "", finding.tensor or "", finding.file or "")
            return layer, expert, *names, finding.offset or 0

        return tuple(sorted(self.all, key=key))
