"""One read brings the parts of an expert to buffers of their own, by every backend."""

import mmap
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import RequestError
from moepack.common.sizes import align
from moepack.storage.buffers import map_memory
from tests.support.faulty_backend import FaultyBackend, make
from tests.support.gguf_builder import F32, moe
from tests.support.models import keys_of, on_disk

PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a model whose parts are whole pages, with room between them in the pack."""
    folder = tmp_path_factory.mktemp("pages")
    builder = moe((0, 1), ne=(64, PAGE // 256), type_id=F32, block=(1, 4))
    builder.write(folder / "m.gguf")
    moepack.pack_model(folder / "m.gguf", folder / "pack", alignment=4 * PAGE)
    return folder / "pack"


@pytest.mark.parametrize("shift", [0, 64, 513])
def test_one_read_brings_parts_to_buffers_anywhere_in_a_page(
    shift: int, name: str, pages: Path
) -> None:
    backend = FaultyBackend(make(name))
    with moepack.open(pages) as pack, pack.reader(backend=backend, depth=3) as reader:
        keys = keys_of(pack)[:6]
        into = [
            {
                kind.name: map_memory(align(kind.length, PAGE) + PAGE)[shift : shift + kind.length]
                for kind in pack.parts(layer)
            }
            for layer, _ in keys
        ]
        for number, expert in enumerate(reader.read_many(keys, into=into)):
            for part, buffer in into[number].items():
                assert buffer == on_disk(pack.locate(*keys[number], part))
                assert expert.part(part) == buffer
            with pytest.raises(RequestError, match="buffers of their own"):
                expert.view  # noqa: B018
        begun = [(one.path, one.offset, one.length) for one in backend.begun]
        assert begun == [tuple(pack.locate(*key))[3:6] for key in keys]


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (["gate", "up"], 0),
        (["gate", "up", "down", "gate_up"], 0),
        (["gate", "up", "down", "ffn_down_exps.weight"], 0),
        (["gate", "up", "down"], -1),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_anything_is_read(
    names: list[str], change: int, pages: Path
) -> None:
    backend = FaultyBackend(make("buffered"))
    with moepack.open(pages) as pack, pack.reader(backend=backend) as reader:
        length = pack.locate(0, 0, "gate").length + change
        with pytest.raises(RequestError) as raised:
            list(reader.read_many([(0, 0)], into=[{name: bytearray(length) for name in names}]))
        assert "layer 0 expert 0" in str(raised.value)
        assert not backend.begun
