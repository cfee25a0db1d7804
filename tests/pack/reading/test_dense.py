"""Dense tensors of a pack: listed, located and read, against the gguf package."""

import mmap
from pathlib import Path

import pytest
from gguf import GGUFReader

import moepack
from moepack.common.errors import MachineError, PackError, RequestError
from moepack.pack.reading import expert_read
from moepack.packing.pack_model import pack_model
from moepack.packing.shard_index import index_model
from moepack.storage.backend import Backend
from tests.support import odd_models
from tests.support.faulty_backend import NAMES, Fault, FaultyBackend, make, require
from tests.support.gguf_builder import F32, moe
from tests.support.models import REAL_MODELS, first_shard, flip, shards_of

pytestmark = pytest.mark.long

LONG_PIECE = expert_read._PIECE_LENGTH
PIECE = 64 << 10


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors be read in pieces that are short; one test has those of everyday."""
    monkeypatch.setattr(expert_read, "_PIECE_LENGTH", PIECE)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """Pack and index a model with a tensor of more than two pieces; give its bytes too."""
    folder = tmp_path_factory.mktemp("large")
    builder = moe((0,)).tensor("big.weight", (64, (2 * PIECE) // 256 + 3), F32, 256)
    path = builder.write(folder / "m.gguf")
    pack_model(path, folder / "pack")
    index_model(path, folder / "index", digests=True)
    return folder / "pack", folder / "index", builder.tensors[-1].data


@pytest.mark.parametrize("model", REAL_MODELS)
def test_names_types_shapes_and_bytes_are_the_models(model: str, packs: dict[str, Path]) -> None:
    tensors = [t for path in shards_of(model) for t in GGUFReader(path).tensors]
    tensors = [tensor for tensor in tensors if "exps" not in tensor.name]
    with moepack.open(packs[model]) as pack, pack.reader() as reader:
        dense = pack.dense()
        assert [tensor.name for tensor in dense] == [tensor.name for tensor in tensors]
        for ours, theirs in zip(dense, tensors, strict=True):
            assert (ours.type_id, ours.type_name) == (
                int(theirs.tensor_type),
                theirs.tensor_type.name,
            )
            assert ours.shape == tuple(map(int, theirs.shape))
            assert bytes(reader.read_dense(ours.name)) == theirs.data.tobytes()
            assert ours.length == theirs.n_bytes
            assert ours.offset % 4096 == 0
            assert pack.locate_dense(ours.name) == ours
            with open(ours.path, "rb") as file:
                file.seek(ours.offset)
                assert file.read(ours.length) == theirs.data.tobytes()


@pytest.mark.parametrize("check", ["always", "first", "never"])
@pytest.mark.parametrize("kind", ["pack", "index"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_several_pieces_is_read_by_every_backend(
    name: str, kind: str, check: str, large: tuple[Path, Path, bytes]
) -> None:
    packed, indexed, expected = large
    path = indexed if kind == "index" else packed
    require(name, large[0])
    with moepack.open(path) as pack, pack.reader(backend=name, check=check) as reader:
        assert bytes(reader.read_dense("big.weight")) == expected
        for buffer in (
            bytearray(b"\xee" * (len(expected) + 64)),
            mmap.mmap(-1, len(expected) + 64),
        ):
            assert reader.read_dense_into(buffer, "big.weight") == len(expected)
            assert buffer[: len(expected)] == expected
            assert buffer[len(expected) :] in (b"\xee" * 64, bytes(64))
        view = reader.read_dense("big.weight")
        view[:4] = b"mine"  # nothing else uses it
        assert bytes(reader.read_dense("big.weight")) == expected


def test_a_tensor_without_bytes_is_read(tmp_path: Path) -> None:
    (path,) = odd_models.write("empty tensors", tmp_path / "source")
    pack_model(path, tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        empty = [tensor for tensor in pack.dense() if not tensor.length]
        assert len(empty) == 4
        for tensor in empty:
            assert bytes(reader.read_dense(tensor.name)) == b""


def test_a_flipped_bit_in_any_piece_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_read, "_PIECE_LENGTH", LONG_PIECE)
    row_count = LONG_PIECE // 256 + 3
    path = moe((0,)).tensor("big.weight", (64, row_count), F32, 256).write(tmp_path / "m")
    pack_model(path, tmp_path / "pack")
    with moepack.open(tmp_path / "pack") as pack:
        where = pack.locate_dense("big.weight")
    for place in (0, LONG_PIECE, where.length - 1):
        flip(where.path, where.offset + place)
        with moepack.open(tmp_path / "pack") as pack, pack.reader(check="first") as reader:
            with pytest.raises(PackError, match="do not have the digest") as raised:
                reader.read_dense("big.weight")
            assert raised.value.path == str(where.path)
            assert raised.value.place == f"tensor big.weight at byte {where.offset:,}"
            assert reader.statistics.error_count == 1
            reader.read_dense("token_embd.weight")
        flip(where.path, where.offset + place)


def test_a_piece_that_cannot_be_read_is_named(large: tuple[Path, Path, bytes]) -> None:
    with moepack.open(large[0]) as pack:
        where = pack.locate_dense("big.weight")
        for fault, kind in ((Fault(code=5), MachineError), (Fault(missing=1), PackError)):
            fault.offset = where.offset + PIECE
            backend: Backend = FaultyBackend(make("buffered"), fault)
            with pack.reader(backend=backend) as reader, pytest.raises(kind) as raised:
                reader.read_dense("big.weight")
            assert raised.value.place == f"tensor big.weight at byte {where.offset + PIECE:,}"


def test_what_is_not_there_is_refused_with_a_hint(packs: dict[str, Path], tmp_path: Path) -> None:
    with moepack.open(packs["qwen3moe"]) as pack, pack.reader() as reader:
        for call in (pack.locate_dense, reader.read_dense):
            with pytest.raises(RequestError, match="no dense tensor nonsense") as raised:
                call("nonsense")
            assert raised.value.hint is None
        with pytest.raises(RequestError, match="does not fit") as too_small:
            reader.read_dense_into(bytearray(5), "token_embd.weight")
        assert "token_embd.weight" in str(too_small.value.place)
    pack_model(first_shard("qwen3moe"), tmp_path / "pack", experts_only=True)
    with moepack.open(tmp_path / "pack") as pack, pack.reader() as reader:
        assert (pack.dense(), pack.shape.dense_length) == ((), None)
        with pytest.raises(RequestError) as raised:
            reader.read_dense("token_embd.weight")
        assert "without the rest" in str(raised.value.hint)
