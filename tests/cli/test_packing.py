"""The commands that make packs and what is made of them: options, words, exit codes."""

import hashlib
import json
from pathlib import Path

import pytest

import moepack
from moepack.cli import main
from tests.support.models import first_shard, shards_of
from tests.support.packs import same_bytes
from tests.support.warm_command import Run

SHARD = first_shard("qwen3moe")


def test_what_is_asked_for_is_in_the_pack(tmp_path: Path, cli: Run) -> None:
    pack, restored = tmp_path / "pack", tmp_path / "restored"
    wishes = ("--sha256", "--alignment", "16KiB", "--layout", "natural")
    assert cli("pack", SHARD, "-o", pack, *wishes).returncode == 0
    shards = [Path(path) for path in shards_of("qwen3moe")]
    with moepack.open(pack) as opened:
        noted = [shard.sha256 for shard in opened.manifest.source.shards]
        assert opened.manifest.layout["blobs"]["alignment"] == 16384
        for layer in opened.layers:
            stride = opened.locate(layer, 0).length
            for expert in range(opened.expert_count(layer)):
                assert opened.locate(layer, expert).offset == expert * stride
                assert opened.locate(layer, expert, "down").offset % 16384 == 0
    assert noted == [hashlib.sha256(path.read_bytes()).hexdigest() for path in shards]
    body = json.loads(cli("restore", pack, "-o", restored, "--json").stdout)
    digests = body["digests"]
    assert body["sha256_count"] == 6
    assert digests["compared_length"] == digests["known_length"] > digests["unknown_length"] == 0
    assert same_bytes(shards, restored)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (("--layers", "0"), "layers are left out"),
        (("--experts-only",), "the dense part is left out"),
        (("--layers", "0", "--experts-only"), "layers and the dense part are left out"),
        ((), None),
    ],
)
def test_the_plan_says_what_is_left_out(
    options: tuple[str, ...],
    missing: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(["pack", str(SHARD), "-o", str(tmp_path / "pack"), *options]) == 0
    text = capsys.readouterr().out
    assert ("blobs of layer 0," if "--layers" in options else "blobs of layers 0-1,") in text
    line = f"\n  whole     no, {missing}: nothing can be restored from it\n"
    assert line in text if missing else "  whole " not in text
    assert text.endswith(f"\nnext: moepack verify {tmp_path / 'pack'} --source {SHARD}\n")


def test_the_hottest_of_nothing_is_said(hot_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, out, err in (
        ((), "", "note: no blob fits into 16.0 KiB\n"),
        (("--json",), '{"blobs": [], "tensors": []}', ""),
    ):
        assert main.run(["list", str(hot_pack), "--hottest", "16KiB", *option]) == 0
        text = capsys.readouterr()
        assert "".join(text.out.split()) == "".join(out.split())
        assert text.err == err


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--strong", "strong digests are not written in place"),
        ("--experts-only", "anything left out would be lost"),
        ("--layers 0", "anything left out would be lost"),
        ("--no-mtp", "leave out --experts-only, --layers and --no-mtp, or --in-place"),
        ("--part 1/3", "by one process"),
        ("--commit", "by one process"),
        ("--executor dask://127.0.0.1:1", "by one process"),
    ],
)
def test_what_cannot_be_done_in_place_is_refused(
    option: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pack", str(SHARD), "-o", str(tmp_path / "pack"), "--in-place", "--yes-delete-source"]
    assert main.run([*words, *option.split()]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "pack").exists()
