"""An image holds the dense part alone, and experts' memory takes none before it is written."""

import mmap
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moepack
from moepack.engines.gguf_layout import lay_out
from moepack.engines.stock_gguf import export_gguf
from moepack.running import expert_memory
from moepack.running.expert_memory import ExpertMemory, Span
from moepack.running.model_image import ModelImage
from moepack.sizes import align
from tests.support.models import REAL_MODELS
from tests.support.resident import PAGE, resident_length


@pytest.mark.parametrize("model", REAL_MODELS)
def test_an_image_is_the_exported_gguf_up_to_the_experts_and_holes_behind(
    model: str, packs: dict[str, Path], tmp_path: Path
) -> None:
    export_gguf(packs[model], tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    with moepack.open(packs[model]) as pack, pack.reader() as reader:
        layout = lay_out(pack, PAGE)
        with ModelImage(layout, reader) as image:
            data = Path(image.path).read_bytes()
            assert len(data) == len(whole) == layout.length
            assert data[: layout.experts_offset] == whole[: layout.experts_offset]
            assert not any(data[layout.experts_offset :])
            assert os.fstat(image.descriptor).st_blocks * 512 <= align(layout.experts_offset, PAGE)
            image.cut()
            assert os.fstat(image.descriptor).st_size == layout.experts_offset
            descriptor = image.descriptor
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_an_image_knows_where_it_is_mapped(packs: dict[str, Path]) -> None:
    with moepack.open(packs["qwen3moe"]) as pack, pack.reader() as reader:
        layout = lay_out(pack, PAGE)
        with ModelImage(layout, reader) as image, ModelImage(layout, reader) as other:
            assert image.mapped() is None
            with mmap.mmap(image.descriptor, 2 * PAGE, offset=PAGE) as mapped:
                address = np.frombuffer(mapped, np.uint8).ctypes.data
                assert image.mapped() == (address - PAGE, 3 * PAGE)
                assert other.mapped() is None


@pytest.fixture
def below() -> mmap.mmap:
    """Give some pages of the address space."""
    return mmap.mmap(-1, 64 * PAGE)


def address_of(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def fill(memory: ExpertMemory, span: Span, value: bytes) -> None:
    memory.view(span)[:] = value * span.length


def mappings(mapped: mmap.mmap) -> list[str]:
    """Return the lines of /proc/self/maps about it."""
    start, found = address_of(mapped), []
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first < start + len(mapped) and last > start:
            found.append(line)
    return found


def test_memory_is_taken_when_it_is_written_and_given_back_page_by_page(below: mmap.mmap) -> None:
    address = address_of(below)
    memory = ExpertMemory(address, 64 * PAGE - 5)
    assert resident_length(address, 64 * PAGE) == 0
    first, second = Span(100, 3 * PAGE), Span(100 + 3 * PAGE, 4 * PAGE)
    fill(memory, first, b"a")
    fill(memory, second, b"b")
    assert resident_length(address, 64 * PAGE) == 8 * PAGE
    memory.give_back([first])
    memory.release()
    assert resident_length(address, 64 * PAGE) == 6 * PAGE, "what it shares with another stays"
    assert bytes(memory.view(second)) == b"b" * second.length
    memory.give_back([second, Span(5, 10)])
    memory.release()
    assert resident_length(address, 64 * PAGE) == 3 * PAGE
    assert not any(memory.view(Span(PAGE, 2 * PAGE)))
    assert bytes(memory.view(Span(100, 1))) == b"a"


def test_pages_that_were_given_back_are_moved_to_where_as_many_are_wanted(
    below: mmap.mmap,
) -> None:
    address = address_of(below)
    memory = ExpertMemory(address, 64 * PAGE)
    old, other, shorter = Span(100, 5 * PAGE), Span(20 * PAGE, 4 * PAGE), Span(30 * PAGE, 3 * PAGE)
    fill(memory, old, b"a")
    memory.give_back([old])
    assert memory.spare_length == 4 * PAGE
    memory.take([shorter, other, Span(40 * PAGE, 4 * PAGE)])
    assert memory.spare_length == 0
    assert resident_length(address + 20 * PAGE, 4 * PAGE) == 4 * PAGE
    assert resident_length(address, 64 * PAGE) == 6 * PAGE, "the pages at the ends of the old stay"
    assert not any(memory.view(Span(PAGE, 4 * PAGE)))
    fill(memory, shorter, b"b")
    assert bytes(memory.view(other)) == b"a" * other.length


def test_pages_of_the_supply_are_taken_first_and_only_so_many(below: mmap.mmap) -> None:
    address = address_of(below)
    memory = ExpertMemory(address, 64 * PAGE)
    memory.supply(9 * PAGE)
    spans = [Span(number * 8 * PAGE, 4 * PAGE) for number in range(4)]
    memory.take(spans[:1])
    assert resident_length(address, 64 * PAGE) == 4 * PAGE, "they are there before they are written"
    memory.take(spans[1:])
    assert resident_length(address, 64 * PAGE) == 8 * PAGE
    for span in spans:
        fill(memory, span, b"a")
        assert bytes(memory.view(span)) == b"a" * span.length
    memory.give_back(spans)
    memory.take(spans)
    memory.release()
    assert resident_length(address, 64 * PAGE) == 16 * PAGE


def test_a_supply_has_huge_pages_where_the_system_does(below: mmap.mmap) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system has no huge pages")
    memory = ExpertMemory(address_of(below), 64 * PAGE)
    memory.supply(64 << 20)
    memory.take([Span(0, 8 * PAGE)])
    start = memory._supply_start
    rest = -start % (2 << 20)
    assert rest > 0
    assert resident_length(start, rest) == rest, "its neighbours came with it"


def test_spare_pages_are_released_down_to_what_is_kept(below: mmap.mmap) -> None:
    memory = ExpertMemory(address_of(below), 64 * PAGE)
    spans = [Span(number * 8 * PAGE, 4 * PAGE) for number in range(4)]
    for span in spans:
        fill(memory, span, b"a")
    memory.give_back(spans)
    memory.release(9 * PAGE)
    assert memory.spare_length == resident_length(address_of(below), 64 * PAGE) == 8 * PAGE


def test_moving_pages_leaves_no_mappings_behind(below: mmap.mmap) -> None:
    memory = ExpertMemory(address_of(below), 64 * PAGE)
    count = len(mappings(below))
    spans = [Span(number * 4 * PAGE, 4 * PAGE) for number in range(16)]
    fill(memory, spans[0], b"a")
    for before, after in pairwise([*spans, *spans[::-2], *spans[::3]]):
        memory.give_back([before])
        memory.take([after])
        assert len(mappings(below)) <= count + 2
    memory.give_back([after])
    memory.give_back([after])
    assert memory.spare_length == 4 * PAGE
    memory.release()
    assert memory.spare_length == 0
    assert len(mappings(below)) == count
    assert not memory._moved


def test_pages_are_not_moved_where_the_system_has_no_mappings_left(
    below: mmap.mmap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "max_map_count"
    limit.write_text("8\n")
    monkeypatch.setattr(expert_memory, "_MAX_MAPPINGS", limit)
    memory = ExpertMemory(address_of(below), 64 * PAGE)
    old = [Span(number * 4 * PAGE, 4 * PAGE) for number in range(2)]
    new = [Span(number * 4 * PAGE, 4 * PAGE) for number in (8, 12)]
    for span in old:
        fill(memory, span, b"a")
    memory.give_back(old)
    memory.take(new)
    assert resident_length(address_of(below), 64 * PAGE) == 4 * PAGE, "one is moved, one is not"
    for span in new:
        fill(memory, span, b"b")
    memory.give_back(new)
    memory.take(old)
    assert resident_length(address_of(below), 64 * PAGE) == 4 * PAGE


def test_experts_memory_has_no_huge_pages(below: mmap.mmap) -> None:
    memory = ExpertMemory(address_of(below), 64 * PAGE)
    spans = Span(4 * PAGE, 4 * PAGE), Span(16 * PAGE, 4 * PAGE)
    fill(memory, spans[0], b"a")
    memory.give_back(spans[:1])
    memory.take(spans[1:])
    starts = tuple(line.split()[0] for line in mappings(below))
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    own = [number for number, line in enumerate(smaps) if line.startswith(starts)]
    flags = [next(line for line in smaps[n:] if line.startswith("VmFlags")) for n in own]
    assert len(flags) == len(starts) > 1
    assert all(" nh" in line for line in flags)


PLACES = [Span(100 + 11 * n * PAGE, (4 + n % 2) * PAGE + n % 3) for n in range(6)]


@given(st.lists(st.integers(0, len(PLACES) - 1), max_size=60), st.integers(0, 40 * PAGE))
def test_what_is_held_stays_what_it_is_whatever_comes_and_goes(
    steps: list[int], kept_length: int
) -> None:
    below = mmap.mmap(-1, 160 * PAGE)
    memory = ExpertMemory(address_of(below), 160 * PAGE)
    memory.supply(9 * PAGE)
    held: set[int] = set()
    for number in steps:
        if number in held:
            held.remove(number)
            memory.give_back([PLACES[number]])
        else:
            held.add(number)
            memory.take([PLACES[number]])
            fill(memory, PLACES[number], bytes([number + 1]))
        if number == 5:
            memory.release(kept_length)
        for other in held:
            span = PLACES[other]
            assert bytes(memory.view(span)) == bytes([other + 1]) * span.length
