"""Where new things go: each list of docs/development.md is followed, with a dummy at its end."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

import moepack
from moepack.cli.copies import Formats
from moepack.common import extras
from moepack.common.errors import PackError, RequestError
from moepack.common.shape import ExpertKey
from moepack.pack.engines import exporting, moe_stream_dir
from moepack.pack.format import records
from moepack.planning.forecasting import modes, rates
from moepack.report.html import report
from moepack.report.html.section import PageSection, ReportFacts
from moepack.running.streaming import table
from moepack.storage import probe
from moepack.traces.caching import cache
from moepack.traces.caching.cache import LeastRecentlyUsed
from moepack.traces.compressed import TraceStream
from moepack.traces.formats import registry
from moepack.traces.model import Items, Origin
from moepack.traces.validation import Checks
from tests.support.models import first_shard
from tests.support.pack_draft import Draft, Piece, draft, tiny

__all__ = ["draft", "tiny"]

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "docs" / "development.md").read_text()
SECTION = SECTION.partition("## Where new things go\n")[2].partition("\n## ")[0]
LISTS = dict(re.findall(r"^\*\*An? ([^*]+)\*\*(.*?)(?=^\*\*|\Z)", SECTION, re.M | re.S))


def files(text: str) -> Iterator[Path]:
    """Yield the files that a list names; a plain name lies beside the file named before it."""
    folder = ROOT
    for name in re.findall(r"`([\w./]+\.\w+|Makefile|[\w./]+/)`", text):
        path = ROOT / name
        if "/" not in name and not path.exists():
            path = folder / name
        folder = path.parent
        yield path


def test_there_is_a_list_for_each_kind_of_change() -> None:
    assert {
        *("trace format", "cache policy", "export", "storage backend", "section of the format"),
        *("new llama.cpp", "forecast class", "page section", "option of the command line"),
    } <= LISTS.keys()


@pytest.mark.parametrize("thing", LISTS)
def test_the_files_of_a_list_exist(thing: str) -> None:
    paths = list(files(LISTS[thing]))
    assert paths
    assert not [path for path in paths if not path.exists()]


def test_a_trace_format_is_recognised_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(stream: TraceStream, checks: Checks) -> Items:
        yield Origin("dummy", stream.name, frozenset())
        raise RequestError("read as a dummy")

    dummy = registry.Format("dummy", lambda head: head.data.startswith(b"dummy"), read)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, dummy))
    path = tmp_path / "trace"
    path.write_text("dummy\n")
    with pytest.raises(RequestError, match="read as a dummy"):
        moepack.trace_statistics(path)


def test_a_cache_policy_is_simulated_and_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dummy(LeastRecentlyUsed):
        pass

    monkeypatch.setattr(cache, "_POLICIES", {**cache._POLICIES, "dummy": Dummy})
    monkeypatch.setattr(cache, "POLICIES", (*cache.POLICIES, "dummy"))
    lengths = {ExpertKey(0, expert): 10 for expert in range(4)}
    assert cache.make("dummy", 20, lengths).budget == 20


def test_simulation_and_programs_have_the_same_policies() -> None:
    names = (ROOT / "native" / "order.h").read_text()
    orders = names.partition("enum policy {")[2].partition("}")[0].split(",")
    numbers = {name.strip(): number for number, name in enumerate(orders)}
    assert set(table.POLICIES) == set(cache.POLICIES)
    for name, number in table.POLICIES.items():
        assert numbers[f"POLICY_{name.upper()}"] == number


def test_an_export_is_a_command_and_in_the_table(
    packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dummy = moe_stream_dir.ENGINE._replace(name="dummy", title="a dummy's engine")
    monkeypatch.setattr(exporting, "ENGINES", (*exporting.ENGINES, dummy))
    help_text = CliRunner().invoke(Formats("export"), ["--help"]).output
    assert "\ndummy, for a dummy's engine:\n" in help_text
    words = ["dummy", str(packs["gpt-oss"]), "-o", str(tmp_path / "dummy")]
    assert CliRunner().invoke(Formats("export"), words).exit_code == 0
    assert moepack.verify_export("dummy", tmp_path / "dummy", pack=packs["gpt-oss"]).passed


def test_a_storage_backend_reads(packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        with pytest.raises(RequestError, match="no such backend"):
            pack.reader(backend="dummy")
        monkeypatch.setattr(probe, "NAMES", (*probe.NAMES, "dummy"))
        with pack.reader(backend="dummy") as reader:
            assert reader.read(0, 0)


def test_a_section_of_the_format_is_checked(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    draft.rebuild([*draft.pieces(), Piece(b"dummies", bytes(8), 4, 0)])
    draft.save()
    moepack.open(draft.path).close()  # an older reader leaves it alone
    monkeypatch.setitem(records.RECORD_LENGTHS, "dummies", 8)
    monkeypatch.setitem(records.COUNTS, "dummies", (1, 1))
    with pytest.raises(PackError, match="dummies: wrong record length"):
        moepack.open(draft.path)


def test_the_version_of_llama_cpp_is_one() -> None:
    package, version = extras.LLAMA_CPP
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [pin for pins in project["optional-dependencies"].values() for pin in pins]
    assert {pin for pin in pins if pin.startswith(package)} == {f"{package}=={version}"}
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(rf"{package}==([\d.]+)", makefile)) == {version}
    build = f"b{version.rpartition('.')[2]}"
    assert f"`grep -rl {build} moepack`" in SECTION
    assert any(build in path.read_text() for path in (ROOT / "moepack").rglob("*.py"))


def test_each_table_of_forecasts_has_every_class() -> None:
    classes = set(get_args(rates.Kind))
    assert set(rates.KIND_WORDS) == set(modes.MICRO_BATCHES) == classes
    assert {*rates.STREAMS, *rates.WITH_GPU} <= classes


def test_a_page_section_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def dummy(facts: ReportFacts) -> PageSection:
        return PageSection("dummy", f"it is about {facts.name}")

    monkeypatch.setattr(report, "SECTIONS", {"A dummy": dummy})
    made = moepack.make_report(first_shard("mixtral"))
    assert made.summary.sections == ("A dummy",)
    assert "It is about" in made.html
