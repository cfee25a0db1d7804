"""The commands that make packs and what is made of them: options, words, exit codes."""

import hashlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import moepack
from moepack.cli import main
from tests.support.gguf_builder import moe
from tests.support.machine_faults import Room
from tests.support.models import FIXTURES, first_shard, flip, shards_of
from tests.support.packs import same_bytes

Run = Callable[..., subprocess.CompletedProcess[str]]
SHARD = first_shard("qwen3moe")


def test_sha256_is_noted_and_restored_by(tmp_path: Path, moepack_command: Run) -> None:
    pack = tmp_path / "pack"
    assert moepack_command("pack", SHARD, "-o", pack, "--sha256").returncode == 0
    shards = [Path(path) for path in shards_of("qwen3moe")]
    with moepack.open(pack) as opened:
        noted = [shard.sha256 for shard in opened.manifest.source.shards]
    assert noted == [hashlib.sha256(path.read_bytes()).hexdigest() for path in shards]
    run = moepack_command("restore", pack, "-o", tmp_path / "restored", "--json")
    body = json.loads(run.stdout)
    assert (run.returncode, body["sha256_count"], body["has_digests"]) == (0, 6, True)
    assert same_bytes(shards, tmp_path / "restored")
    again = moepack_command("restore", pack, "-o", tmp_path / "restored", "--resume")
    assert "there already; every part had its digest, 6 shards the SHA-256" in again.stdout


def test_sha256_is_not_noted_unless_asked(tmp_path: Path, moepack_command: Run) -> None:
    assert moepack_command("pack", SHARD, "-o", tmp_path / "pack").returncode == 0
    with moepack.open(tmp_path / "pack") as pack:
        assert {shard.sha256 for shard in pack.manifest.source.shards} == {None}


def test_experts_alone_are_packed_when_asked(tmp_path: Path, moepack_command: Run) -> None:
    run = moepack_command("pack", SHARD, "-o", tmp_path / "pack", "--experts-only")
    assert run.returncode == 0
    assert "left out: the source stays needed" in run.stdout
    assert not (tmp_path / "pack" / "dense.bin").exists()
    for command in (("restore",), ("export", "gguf")):
        run = moepack_command(*command, tmp_path / "pack", "-o", tmp_path / "out")
        assert run.returncode not in (0, 1, 2)
        assert "not a whole pack: it lacks the dense part" in run.stderr
        assert "with all layers and the dense tensors" in run.stderr
        assert not (tmp_path / "out").exists()


def test_an_alignment_overrules_the_layouts(tmp_path: Path, moepack_command: Run) -> None:
    pack = tmp_path / "pack"
    run = moepack_command("pack", SHARD, "-o", pack, "--alignment", "16KiB")
    assert run.returncode == 0, run.stderr
    with moepack.open(pack) as opened:
        for layer in opened.layers:
            for expert in range(opened.expert_count(layer)):
                assert opened.locate(layer, expert).offset % 16384 == 0
                assert opened.locate(layer, expert).length % 16384 == 0
                for part in opened.parts(layer):
                    assert opened.locate(layer, expert, part.name).offset % 16384 == 0
        assert all(tensor.offset % 16384 == 0 for tensor in opened.dense())
        assert any(tensor.offset % 32768 for tensor in opened.dense())
        assert opened.manifest.layout["blobs"]["alignment"] == 16384


@pytest.mark.parametrize("size", ["0", "3000", "16XB", "-4096", "", "2TiB", "4 pages"])
def test_what_is_no_alignment_is_refused(size: str, tmp_path: Path, moepack_command: Run) -> None:
    pack = tmp_path / "pack"
    run = moepack_command("pack", SHARD, "-o", pack, f"--alignment={size}")
    assert run.returncode == 2, run.stderr
    assert "not an alignment" in run.stderr or "not a size" in run.stderr
    assert not pack.exists()


@pytest.mark.parametrize("size", ["0", "3000", "4MiB"])
def test_what_is_no_alignment_of_an_export_is_refused(
    size: str, packs: dict[str, Path], tmp_path: Path, moepack_command: Run
) -> None:
    target = tmp_path / "m.gguf"
    run = moepack_command("export", "gguf", packs["qwen3moe"], "-o", target, "--alignment", size)
    assert run.returncode == 2, run.stderr
    assert "not an alignment" in run.stderr
    assert not target.exists()


def test_a_dry_run_on_a_disk_that_is_too_small_ends_as_the_run(
    tmp_path: Path, moepack_command: Run
) -> None:
    with Room() as room:
        (tmp_path / "disk").mkdir()
        disk = room.mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "none")
        runs = [
            moepack_command("pack", SHARD, "-o", disk / "pack", *more)
            for more in (("--dry-run",), ())
        ]
        assert [run.returncode for run in runs] == [6, 6]
        assert all("not enough space" in run.stderr for run in runs)
        assert "layout layers" in runs[0].stdout
        assert os.listdir(disk) == []


def test_a_dry_run_where_nothing_can_be_written_ends_as_the_run(
    tmp_path: Path, moepack_command: Run
) -> None:
    with Room() as room:
        (tmp_path / "disk").mkdir()
        disk = room.mount(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "none")
        told = [
            moepack_command("pack", SHARD, "-o", disk / "pack", *more).stderr
            for more in (("--dry-run",), ())
        ]
    assert told == [f"error: {disk / 'pack'}: cannot create: Read-only file system\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("pack", str(SHARD), "-o", "{new}", "--yes-delete-source"),
            "--yes-delete-source: confirms",
        ),
        (("restore", "{pack}", "-o", "{new}", "--yes-delete-pack"), "--yes-delete-pack: confirms"),
        (("restore", "{new}", "--in-place", "-o", "{new}"), "{new}: no such pack"),
        (("restore", "{pack}", "--in-place"), "no folder is given for the shards"),
        (("restore", "{pack}", "--in-place", "-o", "{new}"), "not confirmed: {pack} will be"),
        (("pack", "{copy}", "--in-place", "-o", "{new}"), "not confirmed: 6 shards in"),
    ],
)
def test_what_deletes_is_confirmed_when_it_can_be_done(
    arguments: tuple[str, ...],
    told: str,
    packs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"pack": packs["qwen3moe"], "new": tmp_path / "new", "copy": tmp_path / "source"}
    (tmp_path / "source").mkdir()
    for path in shards_of("qwen3moe"):
        shutil.copy(path, tmp_path / "source")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main.run([word.format(**names) for word in arguments]) in (2, 4)
    assert capsys.readouterr().err.startswith(f"error: {told.format(**names)}")
    assert not (tmp_path / "new").exists()


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
    told = capsys.readouterr().out
    assert ("blobs of layer 0," if "--layers" in options else "blobs of layers 0-1,") in told
    line = f"\n  whole     no, {missing}: nothing can be restored from it\n"
    assert line in told if missing else "  whole " not in told
    assert told.endswith(f"\nnext: moepack verify {tmp_path / 'pack'} --source {SHARD}\n")


def test_the_hottest_of_nothing_is_said(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heat = str(FIXTURES / "qwen3moe-hotness.csv")
    pack = str(tmp_path / "pack")
    assert main.run(["pack", str(SHARD), "-o", pack, "--hotness", heat, "-q"]) == 0
    for option, out, err in (
        ((), "", "note: no blob fits into 16.0 KiB\n"),
        (("--json",), '{"blobs": [], "tensors": []}', ""),
    ):
        assert main.run(["list", pack, "--hottest", "16KiB", *option]) == 0
        told = capsys.readouterr()
        assert "".join(told.out.split()) == "".join(out.split())
        assert told.err == err


def test_what_does_not_belong_together_is_said_in_words(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = moe(tuple(range(2)), 16, ne=(64, 64)).write(tmp_path / "m.gguf")
    brief = ["--seconds", "0", "--point-seconds", "0", "--depths", "1", "--length", "64KiB"]
    assert main.run(["bench", str(packs["qwen3moe"]), "--source", str(builder), *brief]) == 2
    told = capsys.readouterr().err
    assert "expected ffn_down_exps.weight of " in told
    assert "[(" not in told
    heat = str(FIXTURES / "qwen3moe-hotness.csv")
    out = str(tmp_path / "hot.csv")
    assert main.run(["hotness", heat, "--weights", "3,0.5", "-o", out]) == 2
    assert capsys.readouterr().err.rstrip().endswith(", found 3, 0.5")


def test_an_expert_without_a_blob_is_extracted_by_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, target = str(tmp_path / "index"), str(tmp_path / "part")
    assert main.run(["index", str(SHARD), "-o", index, "-q"]) == 0
    at = ["extract", index, "--layer", "0", "--expert", "0", "-o", target]
    assert main.run(at) == 2
    told = capsys.readouterr().err
    part = told.rpartition("hint: name a part with --part, such as ")[2].strip()
    assert main.run([*at, "--part", part]) == 0


def test_the_plan_is_said_before_the_work(tmp_path: Path, moepack_command: Run) -> None:
    heat = FIXTURES / "qwen3moe-hotness.csv"
    pack = tmp_path / "pack"
    run = moepack_command("pack", SHARD, "-o", pack, "--hotness", heat)
    plan, _, done = run.stdout.partition(f"\n{pack}: 3 files, ")
    assert plan.startswith(f"{pack}: layout layers, in the order of hotness\n")
    for words in ("32 blobs of layers 0-1", "32 of 32 blobs measured, over 192 tokens", "3 files"):
        assert words in plan
    assert " written" in done
    assert done.rstrip().endswith(f"next: moepack verify {pack} --source {SHARD}")


def test_a_natural_layout_has_one_stride(tmp_path: Path, moepack_command: Run) -> None:
    pack = tmp_path / "pack"
    heat = FIXTURES / "qwen3moe-hotness.csv"
    run = moepack_command("pack", SHARD, "-o", pack, "--layout", "natural", "--hotness", heat)
    assert run.returncode == 0, run.stderr
    assert "in the order of the source" in run.stdout
    with moepack.open(pack) as opened:
        for layer in opened.layers:
            stride = opened.locate(layer, 0).length
            for expert in range(opened.expert_count(layer)):
                at = ("--layer", layer, "--expert", expert, "--json")
                body = json.loads(moepack_command("locate", pack, *at).stdout) if expert < 3 else {}
                where = opened.locate(layer, expert)
                assert where.offset == body.get("offset", where.offset) == expert * stride
                first = opened.locate(layer, 0, "down").offset
                assert opened.locate(layer, expert, "down").offset == first + expert * stride


def test_an_index_is_laid_exported_and_restored(tmp_path: Path, moepack_command: Run) -> None:
    index = tmp_path / "index"
    run = moepack_command("index", SHARD, "-o", index)
    assert run.returncode == 0
    assert "32 experts of layers 0-1 in 6 shards, without digests" in run.stdout
    target = tmp_path / "m.gguf"
    run = moepack_command("export", "gguf", index, "-o", target)
    assert run.returncode == 0
    lines = run.stdout.splitlines()
    assert lines[0].endswith("; digests are not known")
    assert lines[1] == f"next: llama-server -m {target}"
    run = moepack_command("index", SHARD, "-o", tmp_path / "known", "--digests")
    assert "with digests" in run.stdout
    run = moepack_command("export", "gguf", tmp_path / "known", "-o", target, "--force")
    assert run.stdout.splitlines()[0].endswith("; every part had its digest")
    run = moepack_command("index", SHARD, "-o", index)
    assert run.returncode == 2
    assert "a whole pack is here already" in run.stderr


def test_damage_has_the_exit_code_of_a_broken_pack(
    pack_copy: Path, tmp_path: Path, moepack_command: Run
) -> None:
    flip(pack_copy / "dense.bin", 40)
    run = moepack_command("restore", pack_copy, "-o", tmp_path / "restored")
    assert run.returncode == 4
    assert "header at byte 0: the bytes do not have the digest in the index" in run.stderr
    assert "hint: run `moepack verify`" in run.stderr


def test_hotness_of_another_model_is_refused(tmp_path: Path, moepack_command: Run) -> None:
    larger = moe((0, 1, 2, 3), 32).write(tmp_path / "m.gguf")
    heat = FIXTURES / "qwen3moe-hotness.csv"
    for command in ("pack", "index"):
        run = moepack_command(command, larger, "-o", tmp_path / "out", "--hotness", heat)
        assert run.returncode == 0, run.stderr
        (tmp_path / "out").rename(tmp_path / command)
    trace = FIXTURES / "qwen3moe-trace.csv"
    smaller = moe((0,), 8).write(tmp_path / "s.gguf")
    for path in (heat, trace):
        run = moepack_command("pack", smaller, "-o", tmp_path / "out", "--hotness", path)
        assert run.returncode == 3, run.stderr
        assert "has no" in run.stderr
        assert "another model" in run.stderr
        assert not (tmp_path / "out").exists()
