"""What may be said of digests, and that one place alone says it."""

import re
from pathlib import Path

import pytest

from moepack.common.digest_counts import DigestCounts
from moepack.report import pack_text

PACKAGE = Path(pack_text.__file__).parents[1]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (DigestCounts(2 * MIB, 0, 2 * MIB), "every part had its digest"),
        (DigestCounts(2 * MIB, 0, 0), "no part was read"),
        (
            DigestCounts(2 * MIB, 0, MIB),
            "parts of 1.0 MiB were not read, every other part had its digest",
        ),
        (DigestCounts(0, MIB, 0), "digests are not known"),
        (
            DigestCounts(2 * MIB, MIB, 2 * MIB),
            "digests of 1.0 MiB are not known, every other part had its digest",
        ),
        (DigestCounts(), "no digest was computed"),
    ],
)
def test_only_what_was_computed_is_said(counts: DigestCounts, text: str) -> None:
    assert pack_text.compared(counts) == text


def test_one_module_says_it() -> None:
    claims = re.compile(r"(part|parts|bytes) (had|have|has) (its|their) digest|has its digests")
    places = [path.name for path in PACKAGE.rglob("*.py") if claims.search(path.read_text())]
    assert places == ["pack_text.py"]
