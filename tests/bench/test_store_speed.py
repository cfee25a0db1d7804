"""The speed of a pack in a store: what is requested, and what is reported."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.report import store_text
from moepack.report.json_text import json_text
from moepack.report.printable import printable
from tests.support.pulls import copy_pack, store_of_packs
from tests.support.remote_servers import FileServer
from tests.support.slow_network import slow_network

pytest.importorskip("obstore")


@pytest.fixture
def server(
    packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FileServer]:
    copy_pack(packs["qwen3moe"], tmp_path / "store")
    with store_of_packs(tmp_path / "store", monkeypatch) as one:
        yield one


def test_an_expert_is_one_request_and_its_parts_are_three(server: FileServer) -> None:
    report = moepack.bench_store(f"{server.url}/a.moepack", depths=1, seconds=0.01)
    with moepack.open(f"{server.url}/a.moepack") as pack:
        blobs = [pack.locate(layer, 0).length for layer in pack.layers]
    ranges = [asked for _, path, asked in server.traffic.gets() if "experts" in path]
    lengths = [int(end) - int(start) + 1 for start, end in (r[6:].split("-") for r in ranges if r)]
    whole = [length for length in lengths if length in blobs]
    parts = [length for length in lengths if length not in blobs]
    assert len(whole) >= 4
    assert len(parts) >= 12
    assert max(parts) < min(blobs)
    assert report.parts_per_expert == 3
    assert report.expert_length == sum(blobs) / len(blobs)
    assert [(one.unit, one.depth) for one in report.readings] == [("expert", 1), ("part", 1)]


def test_with_a_slow_network_one_request_for_an_expert_brings_more(server: FileServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with slow_network(port, 0.05) as slow:
        address = f"http://127.0.0.1:{slow}/a.moepack"
        report = moepack.bench_store(address, depths=(1, 8), seconds=0.8)
    assert report.part_seconds > 0.05
    assert report.gains[0].ratio > 1, "three round trips against one"
    text = str(printable(store_text.text(printable(report))))
    assert "whole experts" in text
    body = json.loads(json_text(report))
    assert [gain["depth"] for gain in body["gains"]] == [1, 8]


@pytest.mark.parametrize("depths", [0, 65, []])
def test_depths_out_of_bounds_are_refused(depths: Any, server: FileServer) -> None:
    with pytest.raises(RequestError, match="not a list of depths"):
        moepack.bench_store(f"{server.url}/a.moepack", depths=depths)


def test_a_pack_on_this_machine_is_refused(packs: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="a pack on this machine"):
        moepack.bench_store(packs["qwen3moe"])


def test_the_command_measures_a_store(server: FileServer, cli: Callable[..., Any]) -> None:
    address = f"{server.url}/a.moepack"
    run = cli("bench", address, "--seconds", "0.1", "--depths", "1,4", "--json")
    assert run.returncode == 0
    assert len(json.loads(run.stdout)["readings"]) == 4
    refused = cli("bench", address, "--trace", "x")
    assert refused.returncode == 2
    assert "--trace is for packs on this machine" in refused.stderr
