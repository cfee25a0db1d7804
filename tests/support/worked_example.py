"""The pack of the worked example in layouts/FORMAT.md."""

from pathlib import Path

import pytest

from moepack.traces.hotness import measure
from tests.support.models import FIXTURES, first_shard, pack_model


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the model of the worked example."""
    target = tmp_path_factory.mktemp("example") / "pack"
    heat = measure.load(str(FIXTURES / "qwen3moe-hotness.csv"))
    pack_model([first_shard("qwen3moe")], target, counts=heat.counts, hotness=heat)
    return target
