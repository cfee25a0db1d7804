"""Hotness files: their facts, and the models that they fit."""

import json
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import TraceError
from moepack.common.shape import ExpertKey
from moepack.traces.hotness import file, measure
from moepack.traces.hotness.model import Hotness
from tests.support.gguf_builder import moe
from tests.support.models import FIXTURES, first_shard


def decoded(folder: Path, data: bytes) -> Hotness:
    path = folder / "hot.csv"
    path.write_bytes(data)
    return file.decode(path.read_bytes(), str(path))


def test_the_shipped_file_is_read_with_its_token_count() -> None:
    heat = measure.load(str(FIXTURES / "qwen3moe-hotness.csv"))
    assert heat.token_count == 192
    assert heat.counts[ExpertKey(0, 2)] == 181
    assert sum(heat.counts.values()) == heat.to_json()["selection_count"] == 1284
    heat.check_fits(moepack.shape_of(first_shard("qwen3moe")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"0,4,1", "layer 0, expert 4: the model has no such expert"),
        (b"3,0,1", "layer 3: the model has no experts there"),
    ],
)
def test_hotness_of_another_model_is_refused(tmp_path: Path, line: bytes, message: str) -> None:
    shape = moepack.shape_of(moe().write(tmp_path / "m.gguf"))
    with pytest.raises(TraceError, match=message) as caught:
        decoded(tmp_path, line).check_fits(shape)
    assert "another model" in (caught.value.hint or "")


def test_hotness_that_was_counted_on_another_model_is_refused(tmp_path: Path) -> None:
    """Also where each of its experts is one that the model has."""
    shape = moepack.shape_of(moe((0, 1), 4).write(tmp_path / "m.gguf"))
    counts = {"0": 4, "1": 4}
    for numbers in (counts, {"1": 4}, None, "nonsense"):
        line = json.dumps({"expert_counts": numbers, "model": "Other"}).encode()
        decoded(tmp_path, b"# origin=" + line + b"\n0,1,5\n").check_fits(shape)
    for others in (counts | {"1": 2}, counts | {"2": 4}, {"0": "4"}, {"x": [4]}):
        line = json.dumps({"expert_counts": others, "model": "Other"}).encode()
        with pytest.raises(TraceError, match=r"counted on another model.*Other"):
            decoded(tmp_path, b"# origin=" + line + b"\n0,1,5\n").check_fits(shape)
