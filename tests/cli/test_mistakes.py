"""What people mistype, and what they are told: the table in docs/development.md, and more."""

import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.packing import pack_model
from tests.support import large_models
from tests.support.gguf_builder import GgufBuilder
from tests.support.machines import write_machine
from tests.support.models import FIXTURES, first_shard, flip, shards_of
from tests.support.needs import needs_llama

_DOCUMENT = Path(__file__).parents[2] / "docs" / "development.md"
_ROW = re.compile(r"^\| `(.+?)` \| (\d+) \| (.+) \|$", re.MULTILINE)
_SECTION = _DOCUMENT.read_text().partition("\n## Mistakes\n")[2].partition("\n## ")[0]
ROWS = [
    (line, int(code), re.findall(r"`(.+?)`", names)) for line, code, names in _ROW.findall(_SECTION)
]
MODEL = "model-00001-of-00006.gguf"
_RUN = f"run {MODEL}"
_PLACE = "place large.gguf"
_PACK = f"pack {MODEL} -o new"
_IN_PLACE = "pack own --in-place --yes-delete-source -o new"
_EXPORT = "verify page.gguf --as gguf --pack model.moepack"
_TWO = f"forecast {MODEL} --machine preset:dgx-spark --machine preset:mini-pc-32"
_CPU = f"forecast {MODEL} --machine machine.toml"
REFUSALS = [
    (f"{_PLACE} --ram 8GiB --vram 2GiB", 2, "too little VRAM"),
    (f"{_PLACE} --ram 50%", 2, "a percentage says nothing here"),
    (f"{_TWO} --all", 2, "--all is for one machine"),
    (f"{_TWO} --plot=x.svg", 2, "--plot is for one machine"),
    (f"forecast {MODEL} --ram 32GiB --drive-speed 7", 2, "--drive-speed: not a bandwidth"),
    (f"forecast {MODEL}", 2, "--machine is needed, or --ram"),
    ("doctor --as preset:dgx-spark", 2, "another machine needs a model"),
    (f"report {MODEL} --run prompts.txt -o new.html", 2, "prompts.txt: line 1: not JSON"),
    (f"report {MODEL} --budget 101% --trace trace.csv -o new.html", 2, "more than all"),
    ("mirror model.moepack nowhere", 2, "no such folder"),
    ("export model.moepack", 2, "hint: moepack export --help"),
    ("export vllm model.moepack", 2, "hint: moepack export --help"),
    ("export sglan model.moepack", 2, "hint: moepack export sglang model.moepack"),
    (f"{_EXPORT} --layers 0", 2, "--layers is for packs, not for exports"),
    (f"{_EXPORT} --with-gguf-py", 2, "--with-gguf-py is for packs, not for exports"),
    ("verify model.moepack --pack model.moepack", 2, "name their format with --as"),
    ("machine -o model.moepack/manifest.json", 2, "a file of a pack is never overwritten"),
    ("export gguf model.moepack -o page.gguf", 2, "--force"),
    (f"{_CPU} --n-cpu-moe 1", 2, "the machine has no GPU"),
    (f"{_CPU} --budget 1KiB", 2, "at least 140.0 KiB"),
    (f"{_CPU} --depth 5000", 2, "--depth: more tokens than"),
    (f"{_CPU} --receipt machine.toml", 2, "line 1: not JSON"),
    (f"{_RUN} -p x --memory 300KiB", 2, "too little memory"),
    (f"{_RUN} -p x --total-memory 1MiB", 2, "too little memory for all of the model, expected at"),
    (f"{_RUN} -p x --memory 1GiB --total-memory 2GiB", 2, "--memory and --total-memory at once"),
    (f"{_RUN} --total-memory 2GiB -- touch here", 2, "is not for a program of one's"),
    (f"{_RUN} -p x --memory lots", 2, "`floor` is the only word"),
    (f"{_RUN} -p ''", 2, "leave -p out"),
    (f"{_RUN} -p x --raw --system y", 2, "--system needs"),
    (f"{_RUN} -f nowhere.txt", 2, "cannot read the prompt"),
    (f"{_RUN} --json", 2, "needs a prompt"),
    (f"{_RUN} --chat-template '{{% for'", 2, "cannot use the chat template, found {% for"),
    (f"{_RUN} -f prompts.txt --context 16", 2, "does not fit into the context"),
    (f"{_RUN} -p x --system y", 2, "no template for chats"),
    (f"{_RUN} --temperature 1 -- touch here", 2, "is not for a program of one's"),
    (f"{_RUN} -- true -m {{}} --no-mmap", 2, "with --no-mmap the program reads the whole model"),
    (f"{_RUN} --", 2, "no program is named"),
    (f"{_RUN} -- no-such-program", 127, "no such program"),
    (f"{_RUN} -- /etc/passwd", 126, "/etc/passwd"),
    (f"{_RUN} --memory 1KiB -- touch here", 2, "too little memory for the experts of one step"),
    (f"serve {MODEL} --host no.such.host.example", 6, "cannot listen at no.such.host.example"),
    (f"serve {MODEL} --api-key ''", 2, "an empty API key"),
    (f"serve {MODEL} -- -np 2 --port 8081", 2, "--port goes before --, not after it"),
    ("restore model.moepack -o -", 2, "a folder, not standard output"),
    ("inspect -", 2, "not read from standard input"),
    ("bench model.moepack --trace - --hotness -", 2, "only once"),
    (f"{_PACK} --alignment=16XB", 2, "not a size"),
    (f"{_PACK} --layout layer", 2, "expected hot-first, layers, natural"),
    (f"{_PACK} --layers 7", 2, "layer 7 has no experts"),
    (f"pack {MODEL} -o model.moepack", 2, "choose another directory"),
    ("pack own --in-place -o new", 2, "not confirmed: 6 shards in"),
    (f"{_IN_PLACE} --strong", 2, "strong digests are not written in place"),
    (f"{_IN_PLACE} --experts-only", 2, "anything left out would be lost"),
    (f"{_IN_PLACE} --layers 0", 2, "anything left out would be lost"),
    (f"{_IN_PLACE} --no-mtp", 2, "leave out --experts-only, --layers and --no-mtp, or --in-place"),
    (f"{_IN_PLACE} --part 1/3", 2, "by one process"),
    (f"{_IN_PLACE} --commit", 2, "by one process"),
    ("restore model.moepack --in-place -o new", 2, "not confirmed: model.moepack will be"),
    ("locate model.moepack --layer 9 --expert 0", 2, "it holds layers 0-1"),
    ("rank other.moepack --hotness hot.csv", 3, "was it taken on another model?"),
    ("verify manifest.moepack", 4, "no manifest"),
    ("locate index.moepack --layer 0 --expert 0", 4, "damaged"),
    ("extract blob.moepack --layer 0 --expert 0 -o new", 4, "digest"),
]
"""Further lines, each with its exit code and words of its error."""


def lay_out(desk: Path) -> None:
    """Fill an empty folder with models, packs and traces."""
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


def lay_out_what_is_no_model(desk: Path) -> None:
    """Add files and folders that are named like models."""
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


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out a folder that no mistake may change."""
    folder = tmp_path_factory.mktemp("desk")
    lay_out(folder)
    lay_out_what_is_no_model(folder)
    (folder / "own").mkdir()
    for shard in shards_of("qwen3moe"):
        shutil.copy(shard, folder / "own")
    large_models.write("gpt-oss-120b", folder / "large.gguf")
    for name in ("blob", "index", "manifest"):
        shutil.copytree(folder / "model.moepack", folder / f"{name}.moepack")
    flip(folder / "blob.moepack" / "experts-00000.bin", 5)
    flip(folder / "index.moepack" / "index.bin", 2000)
    (folder / "manifest.moepack" / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("line", "code", "names"),
    [
        *ROWS,
        *(
            pytest.param(
                line, code, [words], marks=needs_llama if line.startswith(("run", "serve")) else ()
            )
            for line, code, words in REFUSALS
        ),
    ],
    ids=[line for line, *_ in (*ROWS, *REFUSALS)],
)
def test_a_mistake_is_answered_with_what_to_type_instead(
    line: str,
    code: int,
    names: list[str],
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = sorted(desk.rglob("*"))
    assert main.run(shlex.split(line)) == code
    printed = capfd.readouterr()
    assert re.search("^error: ", printed.err, re.MULTILINE)
    assert "Traceback" not in printed.err
    assert names
    for name in names:
        assert name in printed.err
    assert sorted(desk.rglob("*")) == before
