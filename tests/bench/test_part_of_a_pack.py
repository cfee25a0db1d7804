"""The bench of a part of a pack measures the drive, never the network."""

from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError
from tests.support.pulls import copy_pack, store_of_packs


def test_only_experts_that_are_here_are_read(
    hot_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_pack(hot_pack, tmp_path / "store", "a")
    little: dict[str, Any] = {
        "seconds": 0,
        "depths": (1,),
        "length": 1 << 16,
        "point_seconds": 0.001,
    }
    with store_of_packs(tmp_path / "store", monkeypatch) as server:
        address = f"{server.url}/a"
        moepack.pull(address, tmp_path / "layer", layers="1")
        moepack.pull(address, tmp_path / "hot", hottest="300kB")
        server.traffic.requests.clear()
        of_layer = moepack.bench_pack(tmp_path / "layer", **little)
        hot = moepack.bench_pack(tmp_path / "hot", **little)
        with pytest.raises(RequestError, match="a part of the pack is not here"):
            moepack.measure_machine(tmp_path / "layer")
        assert not server.traffic.requests
    assert "of those that are here" in of_layer.routing.origin
    sizes = [path.stat().st_size for path in sorted(hot_pack.glob("*.bin"))]
    assert of_layer.pack_length == sizes[0] + sizes[2], "dense and layer 1"
    assert hot.pack_length == sizes[0], "of a file with holes nothing is measured"
