"""Names that would move a cursor, fake a line or turn it around: none reaches a terminal so.

All commands run over a model whose file, folder, tensors and metadata are named so, and whose pack
is damaged. What they print goes to no terminal here: tables are for people wherever they go.
"""

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from moepack.cli import main
from moepack.planning.footprint.model import footprint_of
from tests.support.gguf_builder import F32, moe, split
from tests.support.models import FIXTURES, flip, shards_of
from tests.support.needs import needs_library, needs_llama

FAKE = "error: fake"
"""What a name pretends to be: a line of its own."""
SHORT = f"\x1b[2J\x9b1m\u202e\n{FAKE}\r"
"""What a tensor's name has room for, which is 63 bytes."""
NAME = f"{SHORT}\t\x1b]0;title\x07\x7f\u2066\b"
PATH = f"{NAME}\udcff"
"""Of a file: with a byte that is not UTF-8."""
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
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

    def words(self, command: str) -> list[str]:
        """Return the words of a command, with the names in them."""
        names = self._asdict() | {"folder": self.folder.parent, "new": self.named(""), "name": NAME}
        return [word.format(**names) for word in command.split()]


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


AT = "--layer 0 --expert 1"
COMMANDS = {
    "inspect a source": "inspect {source}",
    "inspect a pack": "inspect {pack}",
    "inspect a folder": "inspect {folder}",
    "inspect nothing": "inspect {new}.gguf",
    "pack": "pack {source} -o {new}.p --layout {new}.toml",
    "pack with hotness": "pack {source} -o {new}.hot --hotness {new}.0.csv",
    "pack again": "pack {source} -o {pack}",
    "pack in place": "pack {source} -o {new}.i --in-place --dry-run",
    "verify": "verify {pack} --source {source}",
    "verify a damaged pack": "verify {damaged} --source {source} -v",
    "verify with another source": f"verify {{pack}} --source {shards_of('mixtral')[0]}",
    "locate": f"locate {{pack}} {AT}",
    "extract": f"extract {{pack}} {AT} -o {{new}}.bin --force",
    "extract what is damaged": "extract {damaged} --layer 0 --expert 0 -o {new}.none",
    "list": "list {pack}",
    "index": "index {source} -o {new}.index",
    "locate in an index": f"locate {{new}}.index {AT}",
    "restore": "restore {pack} -o {new}.shards --force",
    "restore what is damaged": "restore {damaged} -o {new}.none",
    "restore in place": "restore {pack} -o {new}.none --in-place",
    "export": "export gguf {pack} -o {new}.gguf --force",
    "mount": "mount {pack} {new}.none",
    "trace import": "trace import {new}.0.csv -o {new}.moetrace --force",
    "trace stats": "trace stats {new}.0.csv --model {pack}",
    "trace stats of what is none": "trace stats {new}.toml",
    "trace concentration": "trace concentration {new}.0.csv --plot {new}.c.svg --force",
    "hotness": "hotness {new}.0.csv {new}.1.csv -o {new}.hot.csv --force",
    "simulate": "simulate {new}.0.csv --model {pack}",
    "bench": "bench {pack} --source {source} --seconds 0 --depths 1 --length 64KiB "
    "--point-seconds 0.001",
    "machine": "machine {pack} --seconds 0 -o {new}.m.toml --force",
    "forecast": "forecast {pack} --machine {new}.machine --receipt {new}.receipt "
    "--plot {new}.f.svg --force",
    "report": "report {damaged} --trace {new}.0.csv --machine {new}.machine --run {new}.receipt "
    "-o {new}.html --force",
    "place": "place {source} --vram 24GiB --ram 64GiB",
    "place a pack": "place {pack} --ram 64GiB",
    "run": "run {pack} -p Hello -f {new}.toml",
    "an option": "inspect --{name}",
    "a command": "{name}",
    "a choice": "place {source} --engine {name}",
    "a list": "pack {source} -o {new}.none --layers {name}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_name_is_obeyed(name: str, scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    main.run(scene.words(COMMANDS[name]))
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
    assert main.run([*scene.words(COMMANDS[name]), "--json"]) == 0
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


@needs_library
def test_files_for_other_programs_are_well_formed(scene: Scene) -> None:
    """SVG allows few control characters, TOML none in a text."""
    for suffix in (".c.svg", ".f.svg"):
        words = next(words for words in COMMANDS.values() if f"{{new}}{suffix}" in words)
        if not Path(scene.named(suffix)).exists():
            assert main.run(scene.words(words)) == 0
        data = Path(scene.named(suffix)).read_bytes()
        assert len(list(ElementTree.fromstring(data).iter())) > 4
        assert not _OBEYED.findall(data.decode().replace("\t", ""))
    if not Path(scene.named(".m.toml")).exists():
        assert main.run(scene.words(COMMANDS["machine"])) == 0
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
