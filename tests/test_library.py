"""The door of the library: the arguments that its functions take, and refuse."""

import contextlib
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.common.errors import PackError, RequestError, SourceError
from moepack.planning.machine.model import Figure, Machine
from tests.support.models import FIXTURES, first_shard, shards_of

TRACE = FIXTURES / "qwen3moe-trace.csv"
MODEL, MIXTRAL = first_shard("qwen3moe"), first_shard("mixtral")
MACHINE = Machine(None, Figure(64 << 30, "typed"), None)
DOCUMENT = (FIXTURES.parent / "docs" / "library.md").read_text()

Call = Callable[[Any], object]
TAKE_TRACES: dict[str, Call] = {
    "open_trace": lambda paths: sum(1 for _ in moepack.open_trace(paths).tokens()),
    "concentration": moepack.concentration,
    "trace_statistics": lambda paths: moepack.trace_statistics(paths, model=MODEL),
    "simulate": lambda paths: moepack.simulate(paths, model=MODEL, budgets="50%", policies="lru"),
    "measure_hotness": lambda paths: moepack.measure_hotness(paths).hotness,
    "forecast": lambda paths: moepack.forecast(MODEL, MACHINE, traces=paths, budget="50%"),
    "place": lambda paths: moepack.place(MODEL, MACHINE, engine="pack", traces=paths, context=512),
}
TAKE_SOURCES: dict[str, Call] = {
    "open": lambda paths: moepack.open(paths).shape,
    "inspect": moepack.inspect,
    "shape_of": moepack.shape_of,
    "forecast": lambda paths: moepack.forecast(paths, MACHINE).forecasts,
    "place": lambda paths: moepack.place(paths, MACHINE, context=512).option.command[3:],
    "simulate": lambda paths: moepack.simulate(TRACE, model=paths, policies="lru", budgets="1MiB"),
}


@pytest.mark.parametrize("name", TAKE_TRACES)
def test_one_trace_is_named_by_itself_or_in_a_list(name: str) -> None:
    call = TAKE_TRACES[name]
    expected = call([str(TRACE)])
    for paths in (str(TRACE), TRACE, (TRACE,)):
        assert call(paths) == expected
    for wrong in ((path for path in [TRACE]), {TRACE}, [1], 7, b"trace"):
        with pytest.raises(RequestError, match="not a path, expected a path, or a list or tuple"):
            call(wrong)


@pytest.mark.parametrize("name", sorted(TAKE_TRACES.keys() - {"forecast", "place"}))
def test_no_trace_at_all_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="paths: no file is named"):
        TAKE_TRACES[name]([])


@pytest.mark.parametrize("name", TAKE_SOURCES)
def test_a_source_is_named_by_one_path_or_by_all(name: str) -> None:
    call = TAKE_SOURCES[name]
    expected = call(str(MODEL))
    for paths in (MODEL, [MODEL], shards_of("qwen3moe"), tuple(map(Path, shards_of("qwen3moe")))):
        assert call(paths) == expected
    for wrong in (iter([MODEL]), b"model", [b"model"]):
        with pytest.raises(RequestError, match="not a path"):
            call(wrong)


def test_receipts_are_named_by_a_path_of_any_kind(tmp_path: Path) -> None:
    empty = tmp_path / "receipts.json"
    empty.write_text("")
    for receipts in (empty, str(empty), [empty]):
        with pytest.raises(RequestError, match=re.escape(f"{empty}: empty")):
            moepack.forecast(MODEL, MACHINE, receipts=receipts)


def test_a_model_is_a_path_or_what_is_open(packs: dict[str, Path]) -> None:
    options: Any = {"policies": "lru", "budgets": ["300KiB", "50%"]}
    with moepack.open(packs["qwen3moe"]) as pack:
        simulations = [
            moepack.simulate(TRACE, model=model, **options)
            for model in (MODEL, packs["qwen3moe"], pack, pack.shape)
        ]
    assert len({repr(one) for one in simulations}) == 1
    total = moepack.shape_of(MODEL).routed_length
    lengths = sorted({one.budget_length for one in simulations[0].results})
    assert lengths == [300 << 10, total // 2]


def test_layers_are_a_text_or_numbers() -> None:
    options: Any = {"model": MODEL, "policies": "lru", "budgets": "1MiB"}
    expected = moepack.simulate(TRACE, layers=(0,), **options)
    assert moepack.simulate(TRACE, layers="0", **options) == expected
    with pytest.raises(RequestError, match="layers: not a list of layers"):
        moepack.simulate(TRACE, layers="all", **options)


def test_experts_are_counted_by_a_size_or_a_share(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack:
        total = sum(pack.locate(*key).length for key in pack.hottest(1 << 40))
        assert pack.hottest("100%") == pack.hottest(total) == pack.hottest("1GiB")
        quarter = pack.hottest("25%")
        assert quarter == pack.hottest(total // 4)
        assert 0 < len(quarter) < pack.index.blob_count
        of_layer = sum(pack.locate(*key).length for key in pack.hottest(1 << 40, layers=[1]))
        assert pack.hottest("50%", layers=[1]) == pack.hottest(of_layer // 2, layers=[1])
        assert pack.warm("25%") == sum(pack.locate(*key).length for key in quarter)
        with pytest.raises(RequestError, match="byte_budget: not a size"):
            pack.hottest("much")


def test_sizes_of_a_machine_are_texts_too() -> None:
    by_text = moepack.describe_machine(vram="24GB", memory="64G")
    by_number = moepack.describe_machine(vram=[24 << 30], memory=64 << 30)
    assert by_text == by_number
    placements = [
        moepack.place(MODEL, by_text, margin=one, context=512) for one in ("512M", 1 << 29)
    ]
    assert placements[0] == placements[1]
    with pytest.raises(RequestError, match="vram: not a size"):
        moepack.describe_machine(vram="50%", memory="64G")


@pytest.mark.parametrize("call", [moepack.run, moepack.serve])
def test_words_in_one_text_are_refused_with_the_list(call: Callable[..., object]) -> None:
    name = "command" if call is moepack.run else "options"
    arguments: dict[str, Any] = {name: "llama-server -m '{}'"}
    with pytest.raises(RequestError, match=rf"^{name}: a text, not a list of words") as refused:
        call(MODEL, **arguments)
    assert refused.value.expected == ["llama-server", "-m", "{}"]
    with pytest.raises(RequestError, match="not a list of words") as refused:
        call(MODEL, **arguments | {name: "ls 'l"})
    assert refused.value.expected == ["ls", "'l"]


def test_a_folder_of_shards_opens_and_what_is_none_is_refused(tmp_path: Path) -> None:
    for shard in shards_of("mixtral"):
        (tmp_path / Path(shard).name).symlink_to(shard)
    with moepack.open(tmp_path) as opened:
        assert opened.layers == moepack.shape_of(first_shard("mixtral")).layers
    renamed = tmp_path / "no-suffix"
    renamed.symlink_to(FIXTURES / "mixtral-vocab-only.gguf")
    with pytest.raises(SourceError):
        moepack.open(renamed)
    for name, problem in (("nothing", "no such pack"), ("text", "not a pack")):
        (tmp_path / "text").write_text("no model")
        with pytest.raises(PackError, match=problem):
            moepack.open(tmp_path / name)
    with pytest.raises(SourceError, match=r"missing.gguf"):
        moepack.open(tmp_path / "missing.gguf")
    with pytest.raises(RequestError, match="no source"):
        moepack.open([])


def test_every_public_name_has_words_and_is_listed() -> None:
    names = {name for name in dir(moepack) if not name.startswith("_")}
    assert names | {"__version__"} == set(moepack.__all__)
    for name in names:
        words = inspect.getdoc(getattr(moepack, name))
        assert words, name
        assert re.match(r"[A-Z(`].*[.:]", words.splitlines()[0]), name
        assert not words.startswith("Say "), name


def test_the_example_of_a_trace_in_the_document_gives_the_entropy(
    tmp_path: Path, packs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = DOCUMENT[DOCUMENT.index("## Traces, token by token") :]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    moepack.import_trace(TRACE, tmp_path / "mine.moetrace", model=MODEL)
    (tmp_path / "model.moepack").symlink_to(packs["qwen3moe"])
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    rows = (line.split() for line in printed.getvalue().splitlines())
    layers = moepack.concentration(TRACE, model=MODEL).layers
    assert {int(layer): float(bits) for layer, bits in rows} == pytest.approx(
        {one.layer: one.entropy * np.log2(one.expert_count) for one in layers}
    )
