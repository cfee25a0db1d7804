"""The outcome of a verification: findings, and how much was looked at."""

from typing import NamedTuple


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
    file: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        fields = (
            ("layer", self.layer),
            ("expert", self.expert),
            ("", self.part),
            ("in", self.file),
            ("at byte", self.offset),
        )
        where = " ".join(f"{name} {value}".strip() for name, value in fields if value is not None)
        return f"{self.kind}: {where}: {self.message}" if where else f"{self.kind}: {self.message}"


class Report(NamedTuple):
    """The outcome of a verification: lengths in bytes, all findings in a stable order.

    `passed` says that nothing is wrong; `compared_length` is how much was compared with the source,
    None where no source was given.
    """

    passed: bool
    path: str
    findings: tuple[Finding, ...]
    layers: tuple[int, ...]
    blob_count: int
    part_count: int
    read_length: int
    compared_length: int | None
