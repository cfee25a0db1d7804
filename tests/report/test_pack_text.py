"""Summaries of packing, indexing and restoring, and what may be said of digests."""

import re
from pathlib import Path

import pytest

from moepack.common.phases import DigestCounts
from moepack.pack.format.tables import DataFile
from moepack.packing.pack_model import pack_model
from moepack.packing.restore import RestoreSummary
from moepack.packing.shard_index import index_model
from moepack.report import pack_text
from tests.support.models import first_shard, hotness_of

MIB = 1 << 20
ALL = DigestCounts(known_length=MIB, compared_length=MIB)
FILES = (DataFile("a", MIB), DataFile("b", MIB))
RESTORED = RestoreSummary("out", FILES, 2 * MIB, 0, 0, ALL)


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        (RESTORED, "out: 2 shards, 2.0 MiB; every part had its digest"),
        (
            RestoreSummary("out", (DataFile("a", MIB),), MIB, MIB // 4, 1, ALL),
            "out: 1 shard, 1.0 MiB, 256.0 KiB there already; every part had its digest, 1 "
            "shard the SHA-256 of the source",
        ),
        (
            RestoreSummary("out", (DataFile("a", MIB),), MIB, 0, 0, DigestCounts(0, MIB)),
            "out: 1 shard, 1.0 MiB; digests are not known",
        ),
    ],
)
def test_restoring_says_how_and_by_what_it_is_proven(summary: RestoreSummary, text: str) -> None:
    assert pack_text.restored(summary) == text


def test_the_plan_says_what_was_not_given(tmp_path: Path) -> None:
    target = tmp_path / "pack"
    lines = pack_text.plan(pack_model(first_shard("mixtral"), target, dry_run=True)).splitlines()
    assert lines[0] == f"{target}: layout layers, in the order of the source"
    assert "  hotness   none given" in lines
    assert any(line.startswith("  free      ") for line in lines)
    dry = pack_model(first_shard("mixtral"), target, dry_run=True, experts_only=True)
    assert "  dense     left out: the source stays needed" in pack_text.plan(dry)
    assert pack_text.packed(dry) == "nothing was written"


def test_the_plan_says_how_much_the_hotness_covers(tmp_path: Path) -> None:
    heat = hotness_of({(0, 1): 3})
    dry = pack_model(first_shard("qwen3moe"), tmp_path / "p", hotness=heat, dry_run=True)
    assert "16 of 32 blobs measured, over an unknown number of tokens" in pack_text.plan(dry)
    counted = heat._replace(token_count=1234)
    dry = pack_model(first_shard("qwen3moe"), tmp_path / "p", hotness=counted, dry_run=True)
    assert "over 1,234 tokens" in pack_text.plan(dry)


def test_indexing_says_that_nothing_was_copied(tmp_path: Path) -> None:
    text = pack_text.indexed(index_model(first_shard("mixtral"), tmp_path / "i"))
    assert "in 4 shards, without digests; nothing was copied" in text


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
