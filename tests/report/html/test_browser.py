"""The page in Chromium: no complaint, no request, texts under the pointer, layout, colours."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import moepack
from moepack.report.html.report import ReportPage
from tests.support.browser import Tab, browser
from tests.support.gguf_builder import moe
from tests.support.report_pages import TRACE

pytestmark = pytest.mark.long

WIDTHS = (400, 800, 1600)
HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">$x$'
EDGES = (
    "(edges => ({picture: edges('#figure-caches'), table: edges('#caches .table')}))"
    "(name => document.querySelector(name).getBoundingClientRect().toJSON())"
)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def path(page: ReportPage) -> Path:
    assert page.summary.path is not None
    return Path(page.summary.path)


def tip(tab: Tab, name: str) -> str:
    """Return the text about the place under the pointer, as soon as it is shown."""
    selector = f"#figure-{name} .tip"
    shown = f"document.querySelector('{selector}:not([hidden])')"
    return str(tab.wait_for(f"{shown} && {shown}.textContent"))


def seen(tab: Tab, selector: str) -> np.ndarray:
    """Return the pixels of an element, 720 wide, moved to the corner of the window [rows, columns].

    Between pixels, letters would look otherwise.
    """
    style = "position: fixed; z-index: 9; left: 0; top: 0; width: 720px; background: var(--paper)"
    tab.value(f"document.querySelector('{selector}').style = '{style}'")
    _, _, right, bottom = tab.area(selector)
    pixels: np.ndarray = imread(io.BytesIO(tab.picture()))[: int(bottom), : int(right), :3]
    tab.value(f"document.querySelector('{selector}').style = ''")
    return np.asarray(255 * pixels.mean(axis=2))


@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (800, False), (1600, True)])
def test_it_opens_without_a_complaint_a_request_or_a_scroll_bar(
    width: int, is_dark: bool, tab: Tab, path: Path
) -> None:
    tab.open(path, width=width, dark=is_dark)
    tab.wait_for("!document.getElementById('save').hidden")
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [path.as_uri()]
    assert tab.value("document.documentElement.scrollWidth") == width


def test_a_blob_of_the_map_is_where_the_pack_has_it(tab: Tab, path: Path, folder: Path) -> None:
    tab.open(path)
    tab.point_at("#figure-blobs .area", 0.5, 0.3)
    text = tip(tab, "blobs").replace(",", "")
    layer, expert = map(int, re.findall(r"layer (\d+) expert (\d+)", text)[0])
    with moepack.open(folder / "model.moepack") as pack:
        location = pack.locate(layer, expert)
        hotness = pack.hotness(layer, expert).hotness
    assert f"{hotness} selections" in text
    place = f"{location.length} bytes at byte {location.offset}of {location.path.name}"
    assert place in text.replace("\n", "")


def test_an_expert_of_the_heat_map_has_its_count(tab: Tab, path: Path) -> None:
    counts: Counter[tuple[int, int]] = Counter()
    with open(TRACE) as file:
        for row in csv.DictReader(file):
            for expert in row["experts"].split():
                counts[int(row["layer"]), int(expert)] += 1
    tab.open(path)
    texts = [pointed(tab, "heat", share) for share in (0.2, 0.5, 0.7)]
    assert len(set(texts)) == 3
    for text in texts:
        layer, expert, count = re.findall(r"layer (\d+), expert (\d+)\n(\d+) selections", text)[0]
        assert counts[int(layer), int(expert)] == int(count), text


def pointed(tab: Tab, name: str, across: float) -> str:
    tab.point_at(f"#figure-{name} .area", across, 0.3)
    return tip(tab, name)


def test_a_curve_is_described_along_its_axis(tab: Tab, path: Path) -> None:
    tab.open(path)
    texts = [pointed(tab, "coverage", share) for share in (0.2, 0.9)]
    tops = [int(re.findall(r"top (\d+)% of the experts", text)[0]) for text in texts]
    assert 0 < tops[0] < tops[1] < 100
    assert all("uniform router: " in text for text in texts)


def test_arrow_keys_do_as_the_pointer_does(tab: Tab, path: Path) -> None:
    tab.open(path)
    tab.value("document.querySelector('#figure-heat .plot').focus()")
    tab.press("ArrowRight")
    assert tip(tab, "heat").startswith("layer 0, expert ")
    assert "number 1 of 16 in its layer" in tip(tab, "heat")
    tab.press("ArrowDown")
    tab.press("ArrowRight")
    tab.wait_for("document.querySelector('#figure-heat .tip').textContent.includes('number 2')")
    assert tip(tab, "heat").startswith("layer 1, ")
    tab.press("Escape")
    assert tab.value("document.querySelector('#figure-heat .tip').hidden")


def test_a_table_is_beside_its_picture_or_under_it(tab: Tab, path: Path) -> None:
    tab.open(path, width=1600)
    edges = tab.value(EDGES)
    assert edges["table"]["left"] > edges["picture"]["right"]
    assert abs(edges["table"]["top"] - edges["picture"]["top"]) < 10
    tab.open(path, width=400)
    edges = tab.value(EDGES)
    assert edges["table"]["top"] > edges["picture"]["bottom"]
    assert abs(edges["table"]["left"] - edges["picture"]["left"]) < 1


def test_letters_in_pictures_are_readable_in_any_window(tab: Tab, path: Path) -> None:
    for width in WIDTHS:
        tab.open(path, width=width)
        heights = tab.value(
            "[...document.querySelectorAll('.plot text')].map(t => t.getBoundingClientRect())"
            ".filter(b => b.height).map(b => Math.min(b.height, b.width || b.height))"
        )
        assert len(heights) > 50
        assert min(heights) > 5, width  # a digit is higher than it is wide
        assert max(heights) < 20, width


def test_pictures_need_no_script(tab: Tab, path: Path) -> None:
    names = ("parts", "blobs", "heat", "coverage", "forecast")
    tab.open(path)
    scripted = [seen(tab, f"#figure-{name} .plot") for name in names]
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(path)
        plain = [seen(tab, f"#figure-{name} .plot") for name in names]
        assert tab.value("getComputedStyle(document.querySelector('.help')).display") == "none"
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)
    for one, other in zip(scripted, plain, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one, other)
        assert one.std() > 10, "an empty picture"


def test_hot_blobs_are_brighter_than_cold_ones(tab: Tab, path: Path) -> None:
    tab.open(path)
    row = seen(tab, "#figure-blobs .plot")[30]
    assert row[150:190].mean() > 2 * row[-80:-40].mean()


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_stands_out_from_its_ground(is_dark: bool, tab: Tab, path: Path) -> None:
    tab.open(path, dark=is_dark)
    ground = lightness(tab, "--paper")
    assert (ground < 0.1) == is_dark
    for name in ("--ink", "--muted", "--accent"):
        assert contrast(lightness(tab, name), ground) >= 4.5, name
    for number in range(1, 7):
        assert contrast(lightness(tab, f"--c{number}"), ground) >= 3, number


def lightness(tab: Tab, name: str) -> float:
    """Return the relative luminance of a colour of the style (WCAG 2.2)."""
    style = "getComputedStyle(document.documentElement)"
    colour = str(tab.value(f"{style}.getPropertyValue('{name}')")).strip().removeprefix("#")
    channels = (int(colour[start : start + 2], 16) / 255 for start in (0, 2, 4))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_it_prints_on_white_with_all_rows(tab: Tab, path: Path) -> None:
    tab.open(path, dark=True)
    pages = len(re.findall(rb"/Type\s*/Page\b", tab.printed()))
    assert 3 <= pages <= 20
    tab.call("Emulation.setEmulatedMedia", media="print")
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    hidden = (
        "[...document.querySelectorAll('.table')].filter(t => t.scrollHeight > t.clientHeight + 1)"
    )
    assert tab.value(f"{hidden}.length") == 0


def test_a_hostile_name_is_shown_as_it_is(tab: Tab, tmp_path: Path) -> None:
    model = moe(ne=(128, 64)).put("general.name", "str", HOSTILE).write(tmp_path / "model.gguf")
    output = tmp_path / "report.html"
    moepack.make_report(model, output)
    tab.open(output)
    assert tab.value("document.querySelector('h1').textContent") == HOSTILE
    assert tab.value("document.title") == f"{HOSTILE} – moepack"
    assert tab.value("window.broken") is None
    assert tab.complaints == []


def test_the_numbers_can_be_saved(tab: Tab, path: Path, tmp_path: Path) -> None:
    tab.open(path)
    tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    tab.wait_for("!document.getElementById('save').hidden")
    tab.value("document.getElementById('save').click()")
    tab.wait_for("window.waited ??= 1")
    tab.value("new Promise(done => setTimeout(done, 500))")
    assert '"placement"' in (tmp_path / "report.json").read_text()
