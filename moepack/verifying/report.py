"""The outcome of a verification: findings, and how much was looked at."""

from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One thing that is wrong.

    `kind` is stable and machine-readable (README, "verify"); `offset` counts from the start of
    `file`. What does not apply is None.
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

    `compared_length` is how much was compared with the source; None where no source was given.
    """

    path: str
    findings: tuple[Finding, ...]
    layers: tuple[int, ...]
    blob_count: int
    part_count: int
    read_length: int
    compared_length: int | None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the report as `moepack verify --json` prints it."""
        fields = self._asdict()
        fields["findings"] = [finding._asdict() for finding in self.findings]
        return {"passed": self.passed, **fields}
