"""Partial packs are read as packs are: what is here from the drive, the rest from where it came."""

import warnings
from pathlib import Path

import pytest

import moepack
from moepack.common.errors import MachineError, MirrorWarning, PackError
from moepack.common.paths import RemotePath
from tests.support.models import flip, keys_of
from tests.support.pulls import local_keys
from tests.support.remote_servers import FileServer

pytestmark = pytest.mark.long


@pytest.fixture
def part(store: FileServer, address: str, tmp_path: Path) -> Path:
    """Pull half of the experts."""
    moepack.pull(address, tmp_path / "part", hottest="600kB")
    store.traffic.requests.clear()
    return tmp_path / "part"


def test_what_is_here_costs_no_request_and_the_rest_one_each(store: FileServer, part: Path) -> None:
    with moepack.Pack(part) as pack, pack.reader() as reader:
        here = local_keys(pack)
        for key in here:
            reader.read(*key)
        assert not store.traffic.requests
        missing = sorted(set(keys_of(pack)) - here)
        for key in missing:
            reader.read(*key)
        assert len(store.traffic.requests) == 1 + len(missing), "the manifest was looked at once"


def test_a_location_names_the_address_of_an_expert_that_is_not_here(part: Path) -> None:
    with moepack.Pack(part) as pack:
        here = local_keys(pack)
        for key in keys_of(pack):
            for where in (pack.locate(*key), pack.locate(*key, "down")):
                assert isinstance(where.path, RemotePath) == (key not in here)
        assert "elsewhere" in repr(pack)
        rows = list(moepack.list_pack(part))
        assert {type(row.path) for row in rows} == {type(part), RemotePath}


def test_an_expert_that_cannot_be_reached_is_named_with_what_to_do(
    store: FileServer, part: Path
) -> None:
    store.fault, store.status = lambda number: "status", 403
    with moepack.Pack(part) as pack, pack.reader() as reader:
        layer, expert = min(set(keys_of(pack)) - local_keys(pack))
        for read in (
            lambda: reader.read(layer, expert),
            lambda: list(reader.read_many([(layer, expert)])),
        ):
            with pytest.raises(MachineError, match="403 Forbidden") as refusal:
                read()
            assert f"layer {layer} expert {expert}" in str(refusal.value)
            assert f"not in {part}" in str(refusal.value)
            command = f"`moepack pull {store.url}/a.moepack -o {part} --layers {layer}`"
            assert command in str(refusal.value.hint)
        for key in local_keys(pack):
            reader.read(*key)
        store.fault = lambda number: None
        assert reader.read(layer, expert), "as soon as it can be reached again"


@pytest.mark.parametrize("check", ["always", "first"])
def test_an_expert_that_is_damaged_here_is_read_from_there(
    store: FileServer, part: Path, hot_pack: Path, check: str
) -> None:
    with moepack.Pack(part) as pack, moepack.Pack(hot_pack) as whole:
        damaged = min(local_keys(pack))
        where = pack.locate(*damaged)
        flip(where.path, where.offset + 100)
        with whole.reader() as other:
            expected = bytes(other.read(*damaged))
        with pack.reader(check=check) as reader:
            with pytest.warns(MirrorWarning, match="damaged here, and read from .* mends it"):
                assert reader.read(*damaged) == expected
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                (one,) = reader.read_many([damaged])
            assert one.view == expected
            store.fault, store.status = lambda number: "status", 403
            with pytest.raises(PackError, match="do not have the digest") as refusal:
                reader.read(*damaged)
            assert "cannot be read either" in str(refusal.value.hint)


def test_verification_looks_at_what_is_here_and_says_what_is_not(part: Path) -> None:
    with moepack.Pack(part) as pack:
        here = local_keys(pack)
    report = moepack.verify(part)
    assert (report.passed, report.findings) == (None, ())
    assert 0 < report.checked_blob_count == len(here) < report.blob_count
    missing = f"{report.blob_count - len(here)} of {report.blob_count} blobs"
    assert report.not_looked_at[:1] == (missing,)
    assert report.checked_tensor_count == report.tensor_count
    assert report.not_looked_at[-1] == "padding between blobs and tensors"
    of_layer = moepack.verify(part, layers=(1,))
    assert of_layer.checked_blob_count == sum(layer == 1 for layer, _ in here)
    assert of_layer.not_looked_at[0] == "layers 0"


def test_a_part_opens_and_lists_itself_without_a_network(store: FileServer, part: Path) -> None:
    store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with moepack.Pack(part) as pack, pack.reader() as reader:
            for key in local_keys(pack):
                reader.read(*key)
        assert not moepack.verify(part).findings
        assert moepack.inspect(part).partial.origin == f"{store.url}/a.moepack"  # type: ignore[union-attr]
