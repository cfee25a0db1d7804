"""The documents tell the truth: the session, the worked example, commands, fields, links, rooms."""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import moepack
from docs import command_pages
from moepack.cli import main
from moepack.cli.shared import exit_codes
from moepack.cli.words.front import commands_below
from moepack.common import digest
from moepack.common.shape import ExpertKey
from moepack.packing.plan import layout
from moepack.traces.formats import registry
from moepack.traces.hotness.learned import LearnedStore, LearnedWindow
from tests.support.models import FIXTURES, first_shard
from tests.support.needs import needs_library, needs_llama, require_disk
from tests.support.remote_servers import file_server
from tests.support.warm_command import Run
from tests.support.worked_example import example

__all__ = ["example"]


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMON = (ROOT / "docs" / "commands" / "common.md").read_text()
LIBRARY = (ROOT / "docs" / "library.md").read_text()
DEVELOPMENT = (ROOT / "docs" / "development.md").read_text()
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(
        path
        for name in ("docs", "docs/commands", "layouts", "fixtures", "conformance", "tests/support")
        for path in sorted(ROOT.glob(f"{name}/*.md"))
    ),
]
ADDRESSES = {
    "BigMoeOnEdge": "https://github.com/Helldez/BigMoeOnEdge",
    "Anemll": "https://github.com/Anemll/anemll-flash-llama.cpp",
    "analyze_experts.py": "https://rentry.co/MoE-SSD-spillover",
    "ik_llama.cpp": "https://github.com/ikawrakow/ik_llama.cpp",
    "SGLang": "https://github.com/sgl-project/sglang",
    "vLLM": "https://github.com/vllm-project/vllm",
}
"""Where a reader finds the projects that a document names."""
PAGES_OF_COMMANDS = [
    "README.md",
    *(f"docs/{name}.md" for name in ("run-a-model", "agents", "pack-and-ship", "measure-and-buy")),
    "docs/engines.md",
]
CHAT_MODEL = FIXTURES / "chat-00001-of-00002.gguf"


@pytest.mark.long
def test_the_session_of_the_page_on_packing_is_what_the_demo_prints(tmp_path: Path) -> None:
    """In a copy, so that it can run beside others."""
    run = demo(tmp_path)
    assert run.returncode == 0, run.stderr
    page = (ROOT / "docs" / "pack-and-ship.md").read_text()
    first = page.index("    $ moepack pack")
    block = page[first : page.index("\n\n", first)]
    assert [line[4:] for line in block.splitlines()] == run.stdout.splitlines()
    assert "Everything went as expected" in run.stdout.splitlines()[-1]
    assert moepack.verify(tmp_path / "build" / "demo" / "qwen3.moepack").passed  # to try more on


def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo in a copy of the checkout."""
    # Not all of the tests: what Python compiles of them comes and goes while others run.
    shutil.copytree(ROOT / "fixtures", folder / "fixtures")
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "demo.sh", folder / "tests")
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    if not (Path(sys.executable).parent / "moepack").exists():
        pytest.skip("the moepack command is not installed beside this Python")
    command = ["sh", "tests/demo.sh"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_readme_is_read_in_one_sitting() -> None:
    assert README.count("\n") <= 120


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_within_the_project_leads_somewhere(path: Path) -> None:
    for target in links(path):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert linked.resolve().is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(linked), target


def test_the_documents_are_linked_from_the_pages_that_one_begins_with() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in (ROOT / "README.md", ROOT / "docs" / "development.md", command_pages.INDEX)
        for target in links(page)
    }
    assert linked >= set(DOCUMENTS) - {ROOT / "README.md"}


def links(path: Path) -> list[str]:
    """List the links of a document that are no addresses."""
    targets: list[str] = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    return [target for target in targets if "://" not in target]


def anchors(path: Path) -> set[str]:
    """Name the headings of a document as links do."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_project_that_a_document_names_is_linked_there(path: Path) -> None:
    text = path.read_text()
    for name, address in ADDRESSES.items():
        assert address in text or not re.search(rf"(?<![\w/.]){re.escape(name)}(?![\w/-])", text), (
            name
        )


def test_the_example_of_a_trace_file_is_true() -> None:
    """Each row names an integer at an offset, or an offset as a sum."""
    data = (ROOT / "conformance" / "traces" / "example.moetrace").read_bytes()
    text = (ROOT / "layouts" / "TRACE.md").read_text()
    dump = re.findall(r"^    [0-9a-f]{8}: ((?:[0-9a-f]{2,4} )+) ", text, re.MULTILINE)
    assert bytes.fromhex("".join(dump)) == data
    section = text[text.index("## Example") :]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[2:]
    assert len(rows) == 30
    for what, how, value in rows:
        if match := re.match(r"u(8|32|64) at (\d+)", how):
            form = {"8": "<B", "32": "<I", "64": "<Q"}[match[1]]
            (number,) = struct.unpack_from(form, data, int(match[2]))
            expected = digest.from_text(value) if value.startswith("xxh3:") else int(value)
            assert number == expected, what
        else:
            assert sum(map(int, how.split(" + "))) == int(value), what
    assert int(rows[-1][2]) == len(data)


def test_each_page_of_a_command_begins_with_its_help_as_make_docs_writes_it() -> None:
    others = {"common.md", "addresses.md", "trace-formats.md"}
    pages = command_pages.pages()
    present = {path for path in command_pages.FOLDER.glob("*.md") if path.name not in others}
    assert set(pages) == present
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.name}: make docs"


def test_every_command_has_an_example() -> None:
    for name, command in commands_below(main.cli):
        assert f"Example: moepack {name}" in (command.help or ""), name


@pytest.mark.parametrize("name", PAGES_OF_COMMANDS)
def test_commands_in_the_documents_can_be_parsed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = commands_in(name)
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        for word in words:
            if re.fullmatch(r"[\w-]+\.[a-z]+", word):
                (tmp_path / word).touch()
        command: click.Command = main.cli
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        context = command.make_context("moepack", list(words))
        assert "--" not in words or context.params["rest"], line


@needs_llama
def test_the_toy_model_answers_as_the_readme_says(cli: Run) -> None:
    session = re.search(r"^    > (.+)\n    (.+)$", README, re.MULTILINE)
    assert session is not None
    outcome = cli("run", CHAT_MODEL, "-q", "-p", session[1])
    assert (outcome.stdout, outcome.stderr) == (f"{session[2]}\n", "")


@needs_llama
def test_the_toy_model_knows_thirty_answers(cli: Run) -> None:
    blocks = (FIXTURES / "chat.txt").read_text().strip().split("\n\n")
    assert len(blocks) == 30
    lines = [line for block in blocks for line in block.splitlines()]
    questions = [re.findall(r"^\? (.+)$", block, re.MULTILINE)[0] for block in blocks]
    outcome = cli(*("run", CHAT_MODEL, "-q", "--temp", "0"), input="\n/clear\n".join(questions))
    assert outcome.stdout.splitlines() == [line[2:] for line in lines if line.startswith("= ")]


@needs_llama
def test_options_of_llama_server_on_the_page_about_running_are_its_own() -> None:
    """As far as the wheel's version has them."""
    from moepack.running.programs.command import find_reading_option
    from moepack.running.serving.llama_server_options import parse_options

    lines = [line for line in commands_in("docs/run-a-model.md") if " -- llama-server " in line]
    assert len(lines) == 4
    for line in lines:
        options = shlex.split(line.partition(" -- llama-server ")[2])
        assert find_reading_option(options, {}) is None
        assert parse_options(options).model.path == "{}"


def commands_in(name: str) -> list[str]:
    """List the lines of a document that call moepack, sessions and their output left out."""
    text = (ROOT / name).read_text()
    return re.findall(r"^ {4,6}(moepack [a-z].+)$", text, re.MULTILINE)


def test_what_all_commands_share_is_documented() -> None:
    for parameter in main.cli.get_params(click.Context(main.cli, **main.cli.context_settings)):
        assert all(f"`{name}`" in COMMON or f" {name}`" in COMMON for name in parameter.opts)


def page(name: str) -> str:
    """Return the page of a command."""
    return command_pages.page_of(name).read_text()


@pytest.fixture
def address(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the example as a pack that is elsewhere."""
    pytest.importorskip("obstore")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with file_server(example.parent) as server:
        yield f"{server.url}/{example.name}"


def test_the_json_fields_are_those_on_the_page_of_the_command(
    example: Path, address: str, tmp_path: Path, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with moepack.open(example) as pack:
        store = LearnedStore(pack)
    store.add([LearnedWindow(20_000, 40, Counter({ExpertKey(0, 2): 9}))])
    shard = first_shard("qwen3moe")
    at = ("--layer", "0", "--expert", "2")
    damaged = Path(shutil.copytree(example, tmp_path / "damaged"))
    mirrored = Path(shutil.copytree(example, tmp_path / "mirrored"))
    (tmp_path / "drive").mkdir()
    with open(next(damaged.glob("experts-*.bin")), "r+b") as data:
        data.write(bytes(64))
    part = tmp_path / "part"
    assert_fields(
        cli,
        ("pull", address, "-o", part, "--layers", "0"),
        ("inspect", part),
        ("inspect", shard),
        ("mirror", mirrored, tmp_path / "drive"),
        ("inspect", mirrored),
        ("mirror", mirrored, "--remove"),
        ("pack", shard, "-o", tmp_path / "pack"),
        ("index", shard, "-o", tmp_path / "index"),
        ("restore", tmp_path / "pack", "-o", tmp_path / "shards"),
        ("export gguf", tmp_path / "pack", "-o", tmp_path / "model.gguf"),
        ("verify", damaged, "--source", shard),
        ("locate", example, *at),
        ("extract", example, *at, "-o", tmp_path / "blob.bin"),
        ("list", example),
        ("report", example, "-o", tmp_path / "report.html"),
        ("trace import", FIXTURES / "qwen3moe-trace.csv", "-o", tmp_path / "trace"),
        ("trace stats", tmp_path / "trace", "--model", example),
        ("trace concentration", tmp_path / "trace"),
        ("hotness", tmp_path / "trace", "-o", tmp_path / "hot.csv"),
        ("hotness", "--learned", example),
    )


@needs_library
def test_so_are_those_of_a_machine_with_a_drive(example: Path, cli: Run) -> None:
    require_disk(example)
    assert_fields(cli, ("machine", example, "--seconds", "0"))


@needs_llama
def test_so_are_those_of_commands_that_run_a_model(example: Path, cli: Run) -> None:
    little = ("--seconds", "0", "--depths", "1", "--length", "64KiB", "--point-seconds", "0.001")
    briefly = ("--memory", "320MiB", "--rounds", "1", "--prompt-tokens", "20", "--tokens", "2")
    assert_fields(
        cli,
        ("run", example, "-p", "Hello", "-n", "2", "--context", "64"),
        ("bench", example, "--source", first_shard("qwen3moe"), *little),
        ("bench", example, "--run", *briefly),
    )


def assert_fields(run: Run, *commands: tuple[str | Path, ...]) -> None:
    """Compare the JSON of commands with their pages."""
    printed: dict[str, set[str]] = {}
    for name, *arguments in commands:
        outcome = run(*str(name).split(), *arguments, "--json")
        assert outcome.stdout, outcome.stderr
        printed.setdefault(str(name), set()).update(keys(json.loads(outcome.stdout)))
    for name, fields in printed.items():
        assert len(fields) > 3, name
        assert fields == fields_of(page(name)), name


def fields_of(text: str) -> set[str]:
    """Name the fields in the paragraphs about JSON: what is in backticks there."""
    paragraphs = re.findall(r"^JSON.*?(?:\n\n(?!- )|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name for one in paragraphs for name in re.findall(r"`(\w+)`", one)}


def keys(value: object) -> Iterator[str]:
    """Yield the names of all fields, at any depth."""
    if isinstance(value, dict):
        yield from value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from keys(inner)


def test_every_exit_code_is_documented() -> None:
    for code in exit_codes.ExitCode:
        assert re.search(rf"^\| {code.value} \| ", COMMON, re.MULTILINE)


def test_every_trace_format_is_documented() -> None:
    rows = (command_pages.FOLDER / "trace-formats.md").read_text()
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    }
    assert named == set(registry.NAMES)


def test_every_shipped_layout_says_what_it_is() -> None:
    assert layout.names() == ["hot-first", "layers", "natural"]
    for name in layout.names():
        assert layout.load(name).description
        assert f"\n- `{name}`" in page("pack")


def test_every_public_name_stands_in_the_library_document() -> None:
    documented = set(
        re.findall(r"\w+", " ".join(re.findall(r"```python\n.*?```|`[^`]+`", LIBRARY, re.DOTALL)))
    )
    assert not set(moepack.__all__) - documented - {"__version__"}


def test_the_python_in_the_documents_can_be_parsed() -> None:
    for path in DOCUMENTS:
        for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            compile(code, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_calls_have_the_signatures_that_the_library_document_states() -> None:
    (code,) = re.findall(r"```python\n(def open.*?)```", LIBRARY, re.DOTALL)
    signatures: dict[str, Any] = {"ReadOptions": moepack.ReadOptions}
    exec(f"from __future__ import annotations\n{code}", signatures)
    calls = {name: call for name, call in signatures.items() if inspect.isfunction(call)}
    assert len(calls) >= 10
    for name, call in calls.items():
        assert bare(getattr(moepack, name)) == bare(call), name


def bare(call: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a call without its types."""
    signature = inspect.signature(call)
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def test_every_room_and_every_target_is_explained_to_developers() -> None:
    package = ROOT / "moepack"
    rooms = {path.parent.relative_to(package).as_posix() for path in package.rglob("__init__.py")}
    for room in rooms - {"."}:
        assert f"| `{room}/` | " in DEVELOPMENT, room
    for target in make_targets():
        assert f"\n| `make {target}` | " in DEVELOPMENT, target


def test_a_page_says_what_lies_in_the_support_of_tests() -> None:
    folder = ROOT / "tests" / "support"
    named = re.findall(r"`(\w+\.(?:py|c|mjs))`", (folder / "README.md").read_text())
    present = {path.name for path in folder.iterdir() if path.is_file()}
    assert sorted(named) == sorted(present - {"README.md", "__init__.py"})


def test_no_target_is_documented_that_does_not_exist() -> None:
    text = "".join(path.read_text() for path in DOCUMENTS)
    named = re.findall(r"(?:`|^    )make ([\w-]+)", text, re.MULTILINE)
    assert len(named) >= 10
    assert set(named) <= set(make_targets())


def make_targets() -> list[str]:
    """Name the targets of the Makefile that are commands."""
    text = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    return str(targets).split()


def test_every_fixture_is_explained() -> None:
    text = (FIXTURES / "README.md").read_text()
    for path in FIXTURES.iterdir():
        stem = re.sub(r"-0000\d-of-0000\d\.gguf$", "-*", path.name)
        assert path.name == "README.md" or f"`{stem}`" in text
