"""A pack with parts stored by zstd is measured as users read it, and the report says so.

And what `python -m benchmarks.codec` says of the models in fixtures/.
"""

from functools import partial
from pathlib import Path

import pytest

import moepack
from benchmarks import codec
from moepack.packing.pack_model import pack_model
from tests.support.compressible import compressible, with_biases, write_model
from tests.support.models import first_shard


@pytest.mark.parametrize("alignment", [64, 4096])
def test_readers_decode_and_a_note_says_that_others_do_not(alignment: int, tmp_path: Path) -> None:
    """Slices of the shards have the digests of the parts: reading checks them."""
    model = write_model(tmp_path / "m", with_biases(compressible()))
    pack_model(model, tmp_path / "pack", codec="zstd", alignment=alignment)
    measure = partial(moepack.bench_pack, source=model, seconds=0, length=64 << 10, point_seconds=0)
    report = measure(tmp_path / "pack", depths=(1, 4))
    (note,) = [note for note in report.notes if "zstd" in note]
    assert "raw and mapped reads of the pack do not" in note
    assert {reads.layout for reads in report.readings} == {"blobs", "parts", "slices"}
    pack_model(model, tmp_path / "plain")
    plain = measure(tmp_path / "plain", depths=(1,))
    assert not [note for note in plain.notes if "zstd" in note]


@pytest.mark.parametrize(("alignment", "shorter"), [(64, "48 of 48"), (4096, "0 of 48")])
def test_biases_alone_get_shorter_where_padding_leaves_room(
    alignment: int, shorter: str, tmp_path: Path
) -> None:
    rows = list(codec.model_rows(tmp_path, first_shard("gpt-oss"), alignment))
    assert [(row.name, row.moepack) for row in rows] == [
        ("F32: shorter parts", shorter),
        ("MXFP4: shorter parts", "0 of 48"),
    ]
