"""The page as text: its sections, its size, names from files, and what it does not tell."""

import base64
import itertools
import json
import re
import shutil
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.report.html.gather import STAGE_COUNT
from moepack.report.html.report import SECTIONS, ReportPage
from moepack.running.streaming.control import Prefetches
from tests.support.children import run_child
from tests.support.gguf_builder import moe
from tests.support.large_models import write_plain
from tests.support.machines import machine
from tests.support.models import FIXTURES, first_shard
from tests.support.report_pages import TRACE, make

HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">$x$'
MODEL = first_shard("qwen3moe")
OPENS = """
    import sys
    from moepack import make_report
    from moepack.pack.opening.open_model import open_model
    from tests.support.machines import machine

    path, box, names = sys.argv[1], machine(bandwidth=40, drive=3), []
    sys.addaudithook(lambda event, values: names.append(values[0]) if event == "open" else None)
    open_model(path)
    print(sum("-00001-of-" in str(name) for name in names))
    names.clear()
    make_report(path, machine=box)
    print(sum("-00001-of-" in str(name) for name in names))
"""


class Reader(HTMLParser):
    """Collects the elements of a page and the text of each data block."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self._block: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._block = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._block is not None:
            self.blocks[self._block] = data
            self._block = None

    def data(self, name: str) -> Any:
        """Return the JSON of a data block, as a browser inflates it."""
        return json.loads(zlib.decompress(base64.b64decode(self.blocks[name])))


def test_every_section_is_there_with_its_inputs(page: ReportPage) -> None:
    assert len(page.summary.sections) == len(SECTIONS)
    assert page.summary.missing == ()
    assert page.summary.length == len(page.html.encode())


def test_each_picture_has_a_text_and_each_section_a_sentence(page: ReportPage) -> None:
    tags = Reader(page.html).tags
    plots = [attributes for _, attributes in tags if attributes.get("class") == "drawing"]
    assert len(plots) == 7
    assert all(len(one.get("aria-label") or "") > 40 for one in plots)
    assert [one.get("class") for _, one in tags].count("sentence") == len(SECTIONS)
    assert sum(tag == "table" for tag, _ in tags) >= len(SECTIONS)
    ids = [one["id"] for _, one in tags if "id" in one]
    assert len(ids) == len(set(ids))


def test_pictures_are_well_formed_and_maps_have_a_cell_for_each_expert(page: ReportPage) -> None:
    pictures = re.findall(r'<svg class="area".*(?=</div>)', page.html)
    assert len(pictures) == page.html.count("<figure")
    trees = [ElementTree.fromstring(picture) for picture in pictures]
    cells = []
    for tree in trees:
        paths = [one.get("d", "") for one in tree.iter("path")]
        cells.append(sum(int(run) for path in paths for run in re.findall(r"h(\d+)", path)))
    assert sorted(filter(None, cells)) == [32, 32]
    titles = [one.text or "" for tree in trees for one in tree.iter("title")]
    assert any(re.fullmatch(r"experts: down: 448\.0 KiB, [\d.]+%", title) for title in titles)


def test_a_page_opens_the_shards_no_oftener_than_opening_the_model_does() -> None:
    first, second = run_child(OPENS, MODEL).splitlines()
    assert first == second != "0"


def test_a_page_without_inputs_says_what_adds_each_section() -> None:
    summary = moepack.make_report(MODEL).summary
    assert summary.sections == ("The model",)
    assert len(summary.missing) == len(SECTIONS) - 1
    for one in summary.missing:
        assert "`moepack " in one.reason, one


def test_the_same_inputs_give_the_same_page_in_any_folder(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert make(other).html == make(folder).html


def test_a_page_tells_of_no_folder(folder: Path, page: ReportPage) -> None:
    reader = Reader(page.html)
    texts = [page.html, *(json.dumps(reader.data(name)) for name in reader.blocks if name)]
    for text in texts:
        assert str(folder) not in text
        assert str(FIXTURES) not in text
    assert "drawn by qwen3moe-hotness.csv, 4 experts a layer" in page.html


def test_the_numbers_are_those_of_the_other_calls(folder: Path, page: ReportPage) -> None:
    facts = Reader(page.html).data("facts")
    pack = folder / "model.moepack"
    judged = moepack.concentration(TRACE, model=pack)
    assert facts["routing"]["concentration"]["total"]["entropy"] == judged.total.entropy
    at_budget = moepack.simulate(TRACE, model=pack, budgets="50%", policies="lru").results[0]
    lru = next(one for one in facts["at_budget"]["results"] if one["policy"] == "lru")
    assert lru["decode_hit_rate"] == at_budget.decode_hit_rate


def test_the_map_has_every_blob_where_the_pack_has_it(tmp_path: Path) -> None:
    """Also in files of other numbers of blobs, whose rows are filled up."""
    layout, folder = tmp_path / "small.toml", tmp_path / "pack"
    text = (FIXTURES.parent / "layouts" / "hot-first.toml").read_text()
    layout.write_text(text.replace("4 GiB", "450 KiB"))
    hotness = FIXTURES / "qwen3moe-hotness.csv"
    moepack.pack_model(MODEL, folder, layout=str(layout), hotness=hotness)
    values = Reader(moepack.make_report(folder).html).data("data-blobs")["values"]
    fields = ("layer", "expert", "file", "offset", "length", "hotness")
    cells = zip(*(values[field] for field in fields), strict=True)
    with moepack.open(folder) as pack:
        places = [pack.locate(*key) for key in itertools.product((0, 1), range(16))]
    blobs = [(p.layer, p.expert, p.path.name, p.offset, p.length, p.hotness) for p in places]
    assert sorted(cell for cell in cells if cell[0] is not None) == sorted(blobs)


def test_names_from_files_stay_text(tmp_path: Path) -> None:
    builder = moe(ne=(128, 64)).put("general.name", "str", HOSTILE)
    path = builder.write(tmp_path / "a<b>&c.gguf")
    html = moepack.make_report(path).html
    assert "window.broken" in html
    tags = Reader(html).tags
    assert sum(tag == "script" for tag, _ in tags) == 2  # the numbers, and ours
    assert not any("onerror" in attributes or tag == "img" for tag, attributes in tags)


def test_a_policy_of_the_page_forbids_all_requests(page: ReportPage) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page.html)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page.html)


def test_what_was_asked_and_answered_is_not_posted(tmp_path: Path) -> None:
    counts = ("step_count", "hits", "misses", "read_length", "draft_hits", "draft_misses")
    phase: dict[str, Any] = dict.fromkeys(counts, 9)
    phase |= {"hit_rate": 0.75, "tokens_per_second": 6.0}
    phase |= {"seconds": 1.5, "read_seconds": 0.1}
    numbers = ("token_count", "prompt_count", "kept_count", "batch_count", "model_length", "seed")
    run = phase | dict.fromkeys((*numbers, "held_length", "fault_count", "wasted_length"), 4)
    run |= dict.fromkeys(("draft_count", "accepted_count", "rechecked_count"), 0)
    run |= {"text": "a secret", "thoughts": "a thought", "end": "stop", "policy": "lru"}
    run |= {"prompt": phase, "memory": {"experts": 1 << 20, "floor": 9}}
    run |= {"first_token_seconds": 0.2, "prefetches": Prefetches(0, 0, 0, 0, 0, 0)._asdict()}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    html = moepack.make_report(MODEL, runs=path).html
    assert "6 tok/s" in html
    (file,) = Reader(html).data("facts")["runs"]
    assert (file["facts"]["text"], file["facts"]["hit_rate"]) == ("", 0.75)


def test_a_placement_that_is_refused_is_missing_with_its_reason() -> None:
    tiny = machine(memory=1 / 1024, bandwidth=40, drive=3)
    missing = {
        one.title: one.reason for one in moepack.make_report(MODEL, machine=tiny).summary.missing
    }
    assert "memory" in missing["Where everything goes"]


def test_counts_without_tokens_give_no_caches() -> None:
    summary = moepack.make_report(MODEL, traces=FIXTURES / "qwen3moe-hotness.csv").summary
    assert "Which experts are used" in summary.sections
    (reason,) = (one.reason for one in summary.missing if one.title == "Hit rates of caches")
    assert reason.startswith("counts alone do not tell the order of tokens")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a receipt"),
        ("[]", "empty"),
        ('{"surface": 7, "readings": [], "verdict": ""}', "pack: not as moepack writes it"),
        ('{"sides": [{}], "memory_limit": 1, "pack": 3}', "pack: not as moepack writes it"),
    ],
)
def test_other_files_are_no_measurements(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        moepack.make_report(MODEL, runs=path)


def test_progress_ends_with_the_page() -> None:
    steps: list[tuple[int, int]] = []
    moepack.make_report(MODEL, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, STAGE_COUNT)] * STAGE_COUNT


@pytest.mark.long
def test_a_large_model_takes_less_than_half_a_mebibyte(tmp_path: Path) -> None:
    model = write_plain(tmp_path / "m.gguf", layers=60, experts=512, used=10, length=32, dense=4096)
    counts = np.random.default_rng(0).zipf(1.3, (60, 512)).clip(0, 10**6)
    lines = [f"{layer},{expert},{count}" for (layer, expert), count in np.ndenumerate(counts)]
    hotness = tmp_path / "hot.csv"
    hotness.write_text("\n".join(["layer,expert,count", *lines]))
    layout = tmp_path / "dense.toml"
    text = (FIXTURES.parent / "layouts" / "hot-first.toml").read_text()
    layout.write_text(text.replace('alignment = "4 KiB"', "alignment = 64"))
    moepack.pack_model(model, tmp_path / "m.moepack", layout=str(layout), hotness=hotness)
    page = moepack.make_report(tmp_path / "m.moepack", traces=hotness)
    assert len(page.summary.sections) == 4
    assert page.summary.length < 1 << 19
    assert len(Reader(page.html).data("data-heat")["values"]["count"]) == 60 * 512


def test_only_paths_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be called as units are."""
    (tmp_path / "tok").mkdir()
    builder = moe(ne=(128, 64)).put("general.name", "str", "a/b tok/s")
    builder.write(tmp_path / "tok" / "m.gguf")
    monkeypatch.chdir(tmp_path)
    page = moepack.make_report("tok/m.gguf", machine=machine(bandwidth=40, drive=3))
    assert page.summary.title == "a/b tok/s"
    assert "tok/m.gguf" not in page.html
    assert "tok/s" in page.html


def test_a_machine_without_a_drive_has_a_forecast_if_the_model_fits() -> None:
    summary = moepack.make_report(MODEL, machine=machine(bandwidth=40)).summary
    assert "How fast it will be" in summary.sections


def test_a_budget_needs_a_trace() -> None:
    with pytest.raises(RequestError, match="a budget to mark, but no trace"):
        moepack.make_report(MODEL, budget="50%")


def test_a_pack_alone_shows_the_counts_that_ranked_it(folder: Path) -> None:
    page = moepack.make_report(folder / "model.moepack")
    values = Reader(page.html).data("data-heat")["values"]
    cells = zip(values["layer"], values["expert"], values["count"], strict=True)
    with moepack.open(folder / "model.moepack") as pack:
        keys = itertools.product((0, 1), range(16))
        assert sorted(cells) == [(*key, pack.hotness(*key).hotness) for key in keys]
    for row in (values["count"][:16], values["count"][16:]):
        assert row == sorted(row, reverse=True)
    assert "What the hottest experts cover" not in page.summary.sections
