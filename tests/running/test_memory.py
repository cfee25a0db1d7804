"""An image holds the dense part alone, and experts' memory takes none before it is written."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import moepack
from moepack.engines.gguf_layout import lay_out
from moepack.engines.stock_gguf import export_gguf
from moepack.running.expert_memory import ExpertMemory, Span
from moepack.running.model_image import ModelImage
from moepack.sizes import align
from tests.support.models import REAL_MODELS

PAGE = mmap.PAGESIZE


def resident(address: int, length: int) -> int:
    """Return how many bytes of a private mapping are in memory."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(length // PAGE * 8), "<u8")
    return int(np.count_nonzero(entries >> 62)) * PAGE


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


def test_memory_is_taken_when_it_is_written_and_given_back_page_by_page() -> None:
    below = mmap.mmap(-1, 64 * PAGE)
    array = np.frombuffer(below, np.uint8)
    address = array.ctypes.data
    memory = ExpertMemory(address, 64 * PAGE - 5)
    assert resident(address, 64 * PAGE) == 0
    first, second = Span(100, 3 * PAGE), Span(100 + 3 * PAGE, 4 * PAGE)
    for span, value in ((first, b"a"), (second, b"b")):
        memory.view(span)[:] = value * span.length
    assert resident(address, 64 * PAGE) == 8 * PAGE
    memory.give_back([first])
    assert resident(address, 64 * PAGE) == 6 * PAGE, "what it shares with another stays"
    assert bytes(memory.view(second)) == b"b" * second.length
    memory.give_back([second, Span(5, 10)])
    assert resident(address, 64 * PAGE) == 3 * PAGE
    assert not any(memory.view(Span(PAGE, 2 * PAGE)))
    assert bytes(array[100:101]) == b"a"
