"""The documents tell the truth: the session, the worked example, commands, fields, codes."""

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from moepack import digest
from moepack.cli import main
from moepack.format import manifest, records
from moepack.hotness import file
from moepack.packing import layout
from tests.support.models import FIXTURES, first_shard, pack_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FORMAT = (ROOT / "layouts" / "FORMAT.md").read_text()


def test_the_session_on_the_first_screen_is_what_the_demo_prints(tmp_path: Path) -> None:
    """In a copy, so that it can run beside others."""
    for name in ("fixtures", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.py"))
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    if not (Path(sys.executable).parent / "moepack").exists():
        pytest.skip("the moepack command is not installed beside this Python")
    run = subprocess.run(
        ["sh", "tests/demo.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    first = README.index("    $ moepack pack")
    block = README[first : README.index("\n\n", first)]
    assert [line[4:] for line in block.splitlines()] == run.stdout.splitlines()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the model of the worked example."""
    target = tmp_path_factory.mktemp("example") / "pack"
    heat = file.load(str(FIXTURES / "qwen3moe-hotness.csv"))
    pack_model([first_shard("qwen3moe")], target, counts=heat.counts, hotness=heat)
    return target


def test_the_hex_dump_of_the_worked_example_is_the_index(example: Path) -> None:
    dump = re.findall(r"^    [0-9a-f]{8}: ((?:[0-9a-f]{4} ){8})", FORMAT, re.MULTILINE)
    header = bytes.fromhex("".join(dump))
    assert len(header) == 128
    assert (example / "index.bin").read_bytes()[:128] == header


def test_the_numbers_of_the_worked_example_are_true(example: Path) -> None:
    """Each row names an integer at an offset, or an offset that the rows before lead to."""
    data = (example / "index.bin").read_bytes()
    section = FORMAT[FORMAT.index("## Worked example") :]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)[1:]
    checked = 0
    for what, how, value in rows:
        if match := re.match(r"(u32|u64) at (\d+)", how):
            form = {"u32": "<I", "u64": "<Q"}[match[1]]
            (found,) = struct.unpack_from(form, data, int(match[2]))
            expected = digest.from_text(value) if value.startswith("xxh3:") else int(value)
            assert found == expected, what
            checked += 1
        elif sums := re.findall(r"(\d+) \+ (\d+) × (\d+)", how):
            start, count, length = map(int, sums[-1])
            position = start + count * length
            if "rounded up" in how:
                position = -(-position // 64) * 64
            assert position == int(value), what
            checked += 1
    assert checked >= 13


def test_the_manifest_digest_is_what_the_format_says(example: Path) -> None:
    data = (example / "manifest.json").read_bytes()
    assert data[-49:].startswith(b',\n  "manifest_digest": "xxh3:')
    assert digest.to_text(digest.of(data[:-49])).encode() == data[-25:-4]


def test_the_trailer_is_the_digest_of_everything_before_it(example: Path) -> None:
    data = (example / "index.bin").read_bytes()
    assert struct.unpack("<Q", data[-8:])[0] == digest.of(data[:-8])


def test_every_command_and_option_stands_in_the_readme() -> None:
    for name, command in commands(main.cli, ""):
        assert f"### moepack{name}" in README
        assert "Example: moepack" in (command.help or "")
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.opts[0] != "--threads":
                assert parameter.opts[0] in README, (name, parameter.opts)


def commands(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands, those within groups too, with their names."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def test_every_exit_code_stands_in_the_readme() -> None:
    for code in main.ExitCode:
        assert re.search(rf"^\| {code.value} \| ", README, re.MULTILINE)


def test_every_shipped_layout_says_what_it_is() -> None:
    assert layout.names() == ["hot-first", "layers"]
    for name in layout.names():
        assert layout.load(name).description
        assert f"`{name}`" in README


def test_every_fixture_is_explained() -> None:
    text = (FIXTURES / "README.md").read_text()
    for path in FIXTURES.iterdir():
        stem = re.sub(r"-0000\d-of-0000\d\.gguf$", "-*", path.name)
        assert path.name == "README.md" or f"`{stem}`" in text


def test_the_digests_in_the_format_are_right() -> None:
    for length in (0, 200, 300):
        assert digest.to_text(digest.of(bytes(n % 256 for n in range(length)))) in FORMAT


def test_the_limits_in_the_format_are_the_codes() -> None:
    section = FORMAT[FORMAT.index("## Limits") : FORMAT.index("## Compatibility")]
    for limit in (
        *(records.MAX_FILES, records.MAX_FAMILIES, records.MAX_PART_KINDS, records.MAX_EXPERTS),
        *(records.MAX_PARTS_IN_BLOB, records.MAX_BLOBS),
    ):
        assert f"| {limit:,} |" in section
    assert f"| {manifest.MAX_LENGTH >> 20} MiB |" in section
