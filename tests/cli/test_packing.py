"""The commands that make packs, and what is made of them: options, words, exit codes."""

import hashlib
import json
from pathlib import Path

import pytest

import moepack
from moepack.cli import main
from tests.support.models import first_shard, flip, shards_of
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


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a command; return its code and what it prints."""
    code = main.run([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_plan_is_printed_and_nothing_written(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    words = ("export", "moe-flash", packs["mixtral"], "-o", target, "--alignment", "4KiB")
    code, out, err = run(capsys, *words, "--dry-run")
    assert (code, err, target.exists()) == (0, "", False)
    first, takes, free, then = out.splitlines()
    assert first.startswith(f"{target}: 6 tensors in ")
    assert (takes[:11], free[:11]) == ("  takes    ", "  free     ")
    assert then.startswith("  then      LLAMA_FLASH_MOE_ENABLED=1 ")
    code, out, err = run(capsys, *words)
    assert code == 0
    assert "every part had its digest\n" in out
    assert out.splitlines()[-1].startswith("next: LLAMA_FLASH_MOE_ENABLED=1 ")
    assert json.loads((target / "manifest.json").read_bytes())["alignment"] == 4096


def test_an_export_is_verified_with_the_code_for_differences(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert run(capsys, "export", "moe-stream-dir", packs["mixtral"], "-o", target)[0] == 0
    verify = ("verify", "--as", "moe-stream-dir", target)
    for reference in (("--pack", packs["mixtral"]), ("--source", first_shard("mixtral"))):
        code, out, err = run(capsys, *verify, *reference)
        assert (code, err) == (0, "")
        words = "the pack" if reference[0] == "--pack" else "the source"
        assert f"{target}: sound. 16 blobs, 48 parts, " in out
        assert out.endswith(f" compared with {words}\n")
    flip(target / "layer_01.down.bin", 77)
    code, out, err = run(capsys, *verify, "--pack", packs["mixtral"])
    assert code == 5
    assert "layer 1 expert 0 ffn_down_exps.weight in layer_01.down.bin at byte 77: " in out
    code, out, err = run(capsys, *verify, "--pack", packs["mixtral"], "--json")
    assert json.loads(out)["findings"][0]["offset"] == 77


def test_needs_and_their_remedy_are_said_in_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moepack.pack_model(first_shard("gpt-oss"), tmp_path / "pack", experts_only=True)
    code, _, err = run(capsys, "export", "sglang", tmp_path / "pack", "-o", tmp_path / "out")
    assert code == 2
    assert "SGLang cannot read this: it needs a GGUF beside the experts: " in err
    assert "hint: name one with --gguf\n" in err
    assert not (tmp_path / "out").exists()
