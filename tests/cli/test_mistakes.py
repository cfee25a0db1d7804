"""What people mistype, and what they are told: the table in docs/development.md, and more."""

import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

from moepack.cli import main
from moepack.planning.machine.file import toml_text
from tests.support import large_models
from tests.support.desk import lay_out
from tests.support.machines import machine
from tests.support.models import flip, shards_of
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
_GPU, _CPU = (f"forecast {MODEL} --machine {name}.toml" for name in ("gpu", "machine"))
REFUSALS = [
    (f"{_PLACE} --ram 8GiB --vram 2GiB", 2, "too little VRAM"),
    (f"{_PLACE} --ram 8GiB", 2, "too little memory for this model"),
    (f"{_PLACE} --ram 64GiB --cache-type q8_0,", 2, "not a type"),
    (f"{_PLACE} --machine none.toml", 2, "none.toml"),
    (f"{_PLACE} --ram 64GiB --trace x.csv", 2, "places whole layers"),
    (f"{_PLACE} --ram 50%", 2, "a percentage says nothing here"),
    ("mirror model.moepack --hottest 1MiB", 2, "--hottest needs a TARGET"),
    ("mirror model.moepack nowhere --remove", 2, "--remove takes no TARGET"),
    ("mirror model.moepack nowhere", 2, "no such folder"),
    ("mirror model.moepack nowhere --hottest much", 2, "not a size"),
    ("machine --directory no/such", 2, "no/such: no such folder"),
    ("machine model.moepack --directory .", 2, ".: a model and a directory at once"),
    ("machine -o model.moepack/manifest.json", 2, "a file of a pack is never overwritten"),
    ("doctor none.gguf", 3, "none.gguf"),
    ("doctor --directory none", 2, "none: no such folder"),
    ("forecast --machine machine.toml", 2, "a model and --machine are needed"),
    (f"{_GPU} --machine machine.toml", 2, "--machine is given 2 times, but takes one"),
    (f"{_PACK} --hotness hot.csv --hotness=trace.csv", 2, "--hotness is given 2 times"),
    ("trace stats trace.csv --model a --model b", 2, "--model is given 2 times"),
    ("export gguf model.moepack -oa --output b", 2, "--output is given 2 times"),
    (f"{_GPU} --all --n-cpu-moe 1", 2, "either layers in"),
    (f"{_CPU} --n-cpu-moe 1", 2, "the machine has no GPU"),
    (f"{_CPU} --budget 1KiB", 2, "at least 140.0 KiB"),
    (f"{_CPU} --working-set 20", 2, "two numbers of experts, U,D"),
    (f"{_CPU} --working-set nan,0", 2, "not a working set"),
    (f"{_CPU} --depth 5000", 2, "--depth: more tokens than"),
    (f"{_CPU} --budget 1MiB --trace trace.csv --working-set 2,1", 2, "either traces or a working"),
    (f"{_CPU} --receipt machine.toml", 2, "line 1: not JSON"),
    (f"{_CPU} --all --plot plot.txt", 2, "plot.txt"),
    (f"{_CPU} --ram_bytes 1", 2, "--ram_bytes goes with --formula published"),
    (f"forecast {MODEL} --formula published", 2, "takes no model"),
    ("forecast --formula published --batch_size 0", 2, "expected more than"),
    (f"{_RUN} -p x --memory 300KiB", 2, "too little memory"),
    (f"{_RUN} -p x --memory lots", 2, "`floor` is the only word"),
    (f"{_RUN} -p x --memory 1,5GiB", 2, "with a point: 1.5GiB"),
    (f"{_RUN} -p x --pin floor", 2, "--pin: not a size"),
    (f"{_RUN} -p x --raw --system y", 2, "--system needs"),
    (f"{_RUN} -f /dev/zero", 2, "the prompt is too long"),
    (f"{_RUN} -p x -f y", 2, "at once"),
    (f"{_RUN} -f nowhere.txt", 2, "cannot read the prompt"),
    (f"{_RUN} --json", 2, "needs a prompt"),
    (f"{_RUN} -p x -n 0", 2, "no tokens requested"),
    (f"{_RUN} -p x --seed -2", 2, "seed out of bounds"),
    (f"{_RUN} -p x --raw --chat-template chatml", 2, "--chat-template needs one"),
    (f"{_RUN} --chat-template chatmale", 2, "no chat template of that name, found chatmale"),
    (f"{_RUN} --chat-template '{{% for'", 2, "cannot use the chat template, found {% for"),
    (f"{_RUN} --chat-template-file nowhere", 2, "cannot read the chat template"),
    (f"{_RUN} -f prompts.txt --context 16", 2, "does not fit into the context"),
    (f"{_RUN} -p x --temperature -3", 2, "temperature out of bounds"),
    (f"{_RUN} -p x --system y", 2, "no template for chats"),
    *(
        (f"{_RUN} {option} -- touch here", 2, "is not for a program of one's")
        for option in ("-p text", "--tokens 3", "--temperature 1", "--raw", "--json")
    ),
    (f"{_RUN} -- true -m {{}} --no-mmap", 2, "with --no-mmap the program reads the whole model"),
    (f"{_RUN} -- true -m {{}} --load-mode none", 2, "with --load-mode none the program reads"),
    (f"{_RUN} -- true -m {{}} --mlock", 2, "with --mlock the program reads the whole model into"),
    (f"{_RUN} --", 2, "no program is named"),
    (f"{_RUN} -- no-such-program", 127, "no such program"),
    (f"{_RUN} -- /etc/passwd", 126, "/etc/passwd"),
    (f"{_RUN} --memory 1KiB -- touch here", 2, "too little memory for the experts of one step"),
    (f"serve {MODEL} --pin 512", 2, "512MiB?"),
    (f"serve {MODEL} --host no.such.host.example", 6, "cannot listen at no.such.host.example"),
    (f"serve {MODEL} --api-key ''", 2, "an empty API key"),
    (f"serve {MODEL} -- -np 2 --port 8081", 2, "--port goes before --, not after it"),
    ("export gguf model.moepack -o -", 2, "cannot be written to standard output"),
    ("restore model.moepack -o -", 2, "a folder, not standard output"),
    (f"index {MODEL} -o -", 2, "a folder, not standard output"),
    ("mount model.moepack -", 2, "a folder, not standard output"),
    ("inspect -", 2, "not read from standard input"),
    ("pack -o new -", 2, "not read from standard input"),
    ("trace import trace.csv -o t --append --force", 2, "at once"),
    ("bench model.moepack --trace - --hotness -", 2, "only once"),
    *((f"{_PACK} --alignment={one}", 2, "not a size") for one in ("16XB", "''", "'4 pages'")),
    *((f"{_PACK} --alignment={one}", 2, "not an alignment") for one in ("0", "3000", "2TiB")),
    (f"{_PACK} --layers 7", 2, "layer 7 has no experts"),
    (f"{_PACK} --hotness {MODEL}", 3, "without counts"),
    (f"{_PACK} --yes-delete-source", 2, "--yes-delete-source: confirms"),
    ("verify manifest.moepack", 4, "no manifest"),
    ("locate index.moepack --layer 0 --expert 0", 4, "damaged"),
    ("extract blob.moepack --layer 0 --expert 0 -o new", 4, "digest"),
    ("inspect dense-00001-of-00002.gguf", 3, "a dense model"),
    ("inspect none.moepack", 3, "no such file"),
    ("restore model.moepack -o new --yes-delete-pack", 2, "--yes-delete-pack: confirms"),
    ("restore new --in-place -o new", 4, "new: no such pack"),
    ("restore model.moepack --in-place", 2, "no folder was given for the shards"),
    ("restore model.moepack --in-place -o new", 2, "not confirmed: model.moepack will be"),
    (f"pack {MODEL} --in-place -o new", 2, "a link to a file elsewhere"),
    ("pack own --in-place -o new", 2, "not confirmed: 6 shards in"),
    ("trace stats trace.csv --format sometext", 2, "expert-log"),
    ("hotness trace.csv --weights 1,x -o new.csv", 2, "--weights: not a list of numbers"),
    ("hotness hot.csv --weights 3,0.5 -o new.csv", 2, ", found 3, 0.5"),
    ("list model.moepack --csv --json", 2, "not both"),
    ("verify model.moepack -v -q", 2, "at once"),
]
"""Further lines, each with its exit code and words of its error."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out a folder that no mistake may change."""
    folder = lay_out(tmp_path_factory.mktemp("desk"))
    (folder / "own").mkdir()
    for shard in shards_of("qwen3moe"):
        shutil.copy(shard, folder / "own")
    large_models.write("gpt-oss-120b", folder / "large.gguf")
    for name in ("blob", "index", "manifest"):
        shutil.copytree(folder / "model.moepack", folder / f"{name}.moepack")
    flip(folder / "blob.moepack" / "experts-00000.bin", 5)
    flip(folder / "index.moepack" / "index.bin", 2000)
    (folder / "manifest.moepack" / "manifest.json").unlink()
    gpu = machine(vram=24, vram_bandwidth=936, bandwidth=40, drive=3)
    (folder / "gpu.toml").write_text(toml_text(gpu))
    return folder


def test_the_table_has_at_least_sixty_mistakes() -> None:
    assert len(ROWS) >= 60
    assert len({line for line, _, _ in ROWS}) == len(ROWS)


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
