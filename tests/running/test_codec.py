"""A pack with parts stored by zstd runs as one without, and pins by what experts take in memory."""

from pathlib import Path

import numpy as np

import moepack
from moepack.packing.pack_model import pack_model
from moepack.running.engine import Engine
from tests.support import runs
from tests.support.models import first_shard
from tests.support.needs import needs_llama
from tests.support.runs import LEAST, given_up_layers, run

pytestmark = needs_llama


def test_logits_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    """The biases of gpt-oss get shorter, and blobs with them where little is padding."""
    model = first_shard("gpt-oss")
    pack_model(model, tmp_path / "pack", codec="zstd", alignment=64)
    with moepack.open(tmp_path / "pack") as pack:
        parts = [pack.locate(0, 0, kind.name) for kind in pack.parts(0)]
        assert {part.codec for part in parts} == {"zstd", None}
        with Engine(pack, LEAST) as engine:
            found, batch_count = run(engine), engine.batch_count
            assert given_up_layers(engine)
    assert all(map(np.array_equal, found, runs.loaded(model, batch_count)))
