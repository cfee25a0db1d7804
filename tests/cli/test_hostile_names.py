"""Names that would move a cursor, fake a line or turn it around: none reaches a terminal so.

All commands run over a model whose file, folder, tensors and metadata are named so, and whose pack
is damaged. What they print goes to no terminal here: tables are for people wherever they go.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from moepack.cli import main
from moepack.planning.footprint.model import footprint_of
from tests.support.gguf_builder import F32, moe, split
from tests.support.models import FIXTURES, flip, shards_of
from tests.support.needs import needs_llama

FAKE = "error: fake"
"""What a name pretends to be: a line of its own."""
SHORT = f"\x1b[2J\x9b1m\u202e\n{FAKE}\r"
"""What a tensor's name has room for, which is 63 bytes."""
NAME = f"{SHORT}\t\x1b]0;title\x07\x7f\u2066\b"
PATH = f"{NAME}\udcff"
"""Of a file: with a byte that is not UTF-8."""
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
AT = ("--layer", "0", "--expert", "1")
LITTLE = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0.001")
TRACE = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
ROWS = "".join(
    f"0,1,{step},{layer},{slot},{slot},0.5,0,100\n"
    for step in range(9)
    for layer in range(3)
    for slot in range(2)
)
MACHINE = """
[memory]
length = "64 GiB"
bandwidth = "50 GB/s"
[drive]
bandwidth = "3 GB/s"
"""
RECEIPT = {"n_prompt": 0, "n_gen": 128, "avg_ts": 30, "backends": NAME, "gpu_info": NAME}


class Scene(NamedTuple):
    """Where everything is: all of it under hostile names."""

    source: str
    pack: str
    damaged: str
    folder: Path

    def named(self, name: str) -> str:
        """Return the path of a file with a hostile name that ends so."""
        return str(self.folder / f"{PATH}{name}")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("hostile") / PATH
    folder.mkdir()
    builder = moe(ne=(128, 64)).put("general.name", "str", NAME).tensor(SHORT, (8,), F32, 32)
    builder.put("qwen3moe.context_length", "u32", 64)
    builder.put("qwen3moe.embedding_length", "u32", 64).put(
        "qwen3moe.attention.head_count", "u32", 2
    )
    shards = split(builder, 8)
    for number, shard in enumerate(shards, start=1):
        shard.write(folder / f"{PATH}-{number:05}-of-{len(shards):05}.gguf")
    source = str(folder / f"{PATH}-00001-of-{len(shards):05}.gguf")
    pack = folder / f"{PATH}.moepack"
    assert main.run(["pack", source, "-o", str(pack), "-q"]) == 0
    damaged = Path(shutil.copytree(pack, folder / f"{PATH}.damaged"))
    for path in damaged.glob("*.bin"):
        if path.name != "index.bin":
            flip(path, 0)
            flip(path, path.stat().st_size - 4096)
    made = Scene(source, str(pack), str(damaged), folder)
    layout = (FIXTURES.parent / "layouts" / "layers.toml").read_text()
    Path(made.named(".toml")).write_text(layout)
    Path(made.named(".machine")).write_text(MACHINE)
    receipt = RECEIPT | {"model_size": footprint_of(source).weights.length}
    Path(made.named(".receipt")).write_text(json.dumps([receipt]))
    for number in range(2):
        name = NAME.replace(chr(10), "").replace(chr(13), "")
        heading = f"# model={name}{number} arch=qwen3moe\n"
        Path(made.named(f".{number}.csv")).write_text(f"# route_trace v1\n{heading}{TRACE}{ROWS}")
    return made


Command = Callable[[Scene], list[str]]
COMMANDS: dict[str, Command] = {
    "inspect a source": lambda s: ["inspect", s.source],
    "inspect a pack": lambda s: ["inspect", s.pack],
    "inspect a folder": lambda s: ["inspect", str(s.folder.parent)],
    "inspect nothing": lambda s: ["inspect", s.named(".gguf")],
    "pack": lambda s: ["pack", s.source, "-o", s.named(".p"), "--layout", s.named(".toml")],
    "pack with hotness": lambda s: [
        *("pack", s.source, "-o", s.named(".hot"), "--hotness", s.named(".0.csv")),
    ],
    "pack again": lambda s: ["pack", s.source, "-o", s.pack],
    "pack in place": lambda s: ["pack", s.source, "-o", s.named(".i"), "--in-place", "--dry-run"],
    "verify": lambda s: ["verify", s.pack, "--source", s.source],
    "verify a damaged pack": lambda s: [
        *("verify", s.damaged, "--source", s.source, "--junit", s.named(".xml"), "--force", "-v"),
    ],
    "verify with another source": lambda s: ["verify", s.pack, "--source", shards_of("mixtral")[0]],
    "locate": lambda s: ["locate", s.pack, *AT],
    "extract": lambda s: ["extract", s.pack, *AT, "-o", s.named(".bin"), "--force"],
    "extract what is damaged": lambda s: [
        *("extract", s.damaged, "--layer", "0", "--expert", "0", "-o", s.named(".none")),
    ],
    "list": lambda s: ["list", s.pack],
    "index": lambda s: ["index", s.source, "-o", s.named(".index")],
    "locate in an index": lambda s: ["locate", s.named(".index"), *AT],
    "restore": lambda s: ["restore", s.pack, "-o", s.named(".shards"), "--force"],
    "restore what is damaged": lambda s: ["restore", s.damaged, "-o", s.named(".none")],
    "restore in place": lambda s: ["restore", s.pack, "-o", s.named(".none"), "--in-place"],
    "export": lambda s: ["export", "gguf", s.pack, "-o", s.named(".gguf"), "--force"],
    "mount": lambda s: ["mount", s.pack, s.named(".none")],
    "trace import": lambda s: [
        *("trace", "import", s.named(".0.csv"), "-o", s.named(".moetrace"), "--force"),
    ],
    "trace stats": lambda s: ["trace", "stats", s.named(".0.csv"), "--pack", s.pack],
    "trace stats of what is none": lambda s: ["trace", "stats", s.named(".toml")],
    "trace concentration": lambda s: [
        *("trace", "concentration", s.named(".0.csv"), "--plot", s.named(".c.svg"), "--force"),
    ],
    "hotness": lambda s: [
        *("hotness", s.named(".0.csv"), s.named(".1.csv"), "-o", s.named(".hot.csv"), "--force"),
    ],
    "simulate": lambda s: ["simulate", s.named(".0.csv"), "--model", s.pack],
    "bench": lambda s: ["bench", s.pack, "--source", s.source, *LITTLE],
    "machine": lambda s: ["machine", s.pack, "--seconds", "0", "-o", s.named(".m.toml"), "--force"],
    "forecast": lambda s: [
        *("forecast", s.pack, "--machine", s.named(".machine"), "--receipt", s.named(".receipt")),
        *("--plot", s.named(".f.svg"), "--force"),
    ],
    "report": lambda s: [
        *("report", s.damaged, "--trace", s.named(".0.csv"), "--machine", s.named(".machine")),
        *("--run", s.named(".receipt"), "--verify", "-o", s.named(".html"), "--force"),
    ],
    "place": lambda s: ["place", s.source, "--vram", "24GiB", "--ram", "64GiB"],
    "place a pack": lambda s: ["place", s.pack, "--ram", "64GiB"],
    "run": lambda s: ["run", s.pack, "-p", "Hello", "-f", s.named(".toml")],
    "an option": lambda s: ["inspect", f"--{NAME}"],
    "a command": lambda s: [NAME],
    "a choice": lambda s: ["place", s.source, "--engine", NAME],
    "a list": lambda s: ["pack", s.source, "-o", s.named(".none"), "--layers", NAME],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_name_is_obeyed(
    command: Command, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    main.run(command(scene))
    said = capsys.readouterr()
    assert said.out + said.err
    assert "mistake in moepack" not in said.err, ascii(said.err)
    for text in (said.out, said.err):
        assert not _OBEYED.findall(text), ascii(text)
        assert FAKE not in [line.strip() for line in text.splitlines()], ascii(text)


@pytest.mark.parametrize("name", ["inspect a source", "inspect a pack", "list", "place", "verify"])
def test_json_escapes_by_itself_and_says_the_names_as_they_are(
    name: str, scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*COMMANDS[name](scene), "--json"]) == 0
    said = capsys.readouterr().out
    assert not _OBEYED.findall(said)
    assert NAME in "\n".join(strings(json.loads(said)))


def strings(value: object) -> list[str]:
    """List all texts in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_files_for_other_programs_are_well_formed(scene: Scene) -> None:
    """JUnit XML and SVG allow few control characters, TOML none in a text."""
    for suffix in (".xml", ".c.svg", ".f.svg"):
        name = next(name for name, words in COMMANDS.items() if scene.named(suffix) in words(scene))
        if not Path(scene.named(suffix)).exists():
            assert main.run(COMMANDS[name](scene)) == (5 if suffix == ".xml" else 0)
        data = Path(scene.named(suffix)).read_bytes()
        assert len(list(ElementTree.fromstring(data).iter())) > 4
        assert not _OBEYED.findall(data.decode().replace("\t", ""))
    if not Path(scene.named(".m.toml")).exists():
        assert main.run(COMMANDS["machine"](scene)) == 0
    again = ["forecast", scene.pack, "--machine", scene.named(".m.toml")]
    assert main.run(again) == 0


def test_csv_is_for_programs(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """Paths in it are those of the files, which have to be opened."""
    assert main.run(["list", scene.pack, "--csv"]) == 0
    assert NAME in capfd.readouterr().out


@needs_llama
def test_running_a_model_obeys_none_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / PATH
    folder.mkdir()
    for shard in shards_of("qwen3moe"):
        (folder / Path(shard).name).symlink_to(shard)
    small = ("--memory", "floor", "--context", "64", "--threads", "1", "--temperature", "0")
    for code, options in (
        (0, ("-p", "Hello", "-n", "3")),
        (2, ("--raw", "--system", "x")),
        (2, ("-p", "Hello", "--system", "x")),
    ):
        assert main.run(["run", str(folder), *options, *small]) == code
        said = capsys.readouterr()
        assert said.err
        assert not _OBEYED.findall(said.err)
