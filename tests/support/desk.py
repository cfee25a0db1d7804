"""A folder as people have it: models, packs, traces, and files that are none of them."""

import shutil
from pathlib import Path

from moepack.packing import pack_model
from tests.support.gguf_builder import GgufBuilder
from tests.support.machines import write_machine
from tests.support.models import FIXTURES, first_shard, shards_of


def lay_out(desk: Path) -> Path:
    """Fill an empty folder, and return it."""
    for number, shard in enumerate(shards_of("qwen3moe"), 1):
        (desk / f"model-{number:05d}-of-00006.gguf").symlink_to(shard)
    for number in (1, 2):
        name = f"{number:05d}-of-00002.gguf"
        (desk / f"dense-{name}").symlink_to(FIXTURES / f"llama-dense-Q4_K_M-t12-{name}")
    for name, fixture in (
        ("trace.csv", "qwen3moe-trace.csv"),
        ("hot.csv", "qwen3moe-hotness.csv"),
        ("imatrix.gguf", "qwen3moe-imatrix.gguf"),
        ("prompts.txt", "prompt.txt"),
    ):
        shutil.copy(FIXTURES / fixture, desk / name)
    write_machine(desk / "machine.toml", bandwidth=40, drive=3)
    pack_model.pack_model([first_shard("qwen3moe")], desk / "model.moepack")
    pack_model.pack_model([first_shard("mixtral")], desk / "other.moepack")
    _lay_out_what_is_no_model(desk)
    return desk


def _lay_out_what_is_no_model(desk: Path) -> None:
    whole = first_shard("mixtral").read_bytes()
    for name, data in (
        ("page.gguf", b"<!doctype html><html><title>401</title></html>"),
        (
            "pointer.gguf",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n",
        ),
        ("half.gguf", whole[: len(whole) // 2]),
        ("model.zip", b"PK\x03\x04" + bytes(60)),
        ("fetched.gguf.part", whole),
        ("torrent.gguf", whole),
        ("torrent.gguf.aria2", bytes(40)),
        ("notes.txt", b"Why is the sky blue?\n"),
        ("model.safetensors", (58).to_bytes(8, "little") + b'{"__metadata__":{}}'),
    ):
        (desk / name).write_bytes(data)
    builder = GgufBuilder().put("general.architecture", "str", "clip")
    builder.put("general.type", "str", "mmproj").write(desk / "mmproj.gguf")
    for name in ("hub", "several", "tail"):
        (desk / name).mkdir()
    (desk / "hub" / "config.json").write_text("{}")
    (desk / "hub" / "model-00001-of-00002.safetensors").write_bytes(
        (58).to_bytes(8, "little") + b'{"__metadata__":{}}'
    )
    for name in ("q4", "q8"):
        shutil.copy(FIXTURES / "mixtral-vocab-only.gguf", desk / "several" / f"{name}.gguf")
    second = FIXTURES / "mixtral-Q4_K_M-t7-00002-of-00004.gguf"
    shutil.copy(second, desk / "tail" / "tail-00002-of-00004.gguf")
