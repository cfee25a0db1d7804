"""Packing a model that is elsewhere: on a hub whose files another host sends, or a web server."""

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.common.errors import RequestError, SourceError
from moepack.pack.verifying.verifier import verify
from moepack.packing.pack_model import pack_in_place, pack_model
from moepack.packing.shard_index import index_model
from moepack.source.remote_model import find_remote_shards
from moepack.source.shards import open_source
from moepack.storage import inputs
from moepack.storage.input_file import open_input
from moepack.storage.remote import store as remote_store
from moepack.storage.remote.store import RemoteError, RemoteStamp
from moepack.storage.remote.stores import check_length, forget_stores, resolve, store_of
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.models import FIXTURES, contents, first_shard, shards_of
from tests.support.remote_servers import FakeHub, Fault, file_server, sha256

MODEL = "qwen3moe"

pytestmark = pytest.mark.long


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_of(tmp_path / "hub", monkeypatch, shards_of(MODEL), "UD-Q4_K_XL") as server:
        folder = server.folder / REPOSITORY
        (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
        (folder / "README.md").write_text("a model")
        yield server


@pytest.fixture
def local(packs: dict[str, Path]) -> Path:
    """Return the pack of the same shards where they lie on the disk."""
    return packs[MODEL]


def differing(pack: Path, other: Path) -> list[str]:
    """Name the files that two packs do not share, without their manifests."""
    _, mismatch, errors = filecmp.cmpfiles(pack, other, os.listdir(other), shallow=False)
    return sorted({*mismatch, *errors} - {"manifest.json"})


def test_a_model_of_the_hub_becomes_the_same_pack_and_is_never_stored(
    hub: FakeHub, local: Path, tmp_path: Path
) -> None:
    pack_model(f"hf://{REPOSITORY}/UD-Q4_K_XL", tmp_path / "pack")
    assert not differing(tmp_path / "pack", local)
    text = (tmp_path / "pack" / "manifest.json").read_text()
    assert all(sha256(Path(shard)) in text for shard in shards_of(MODEL)), "as the hub states it"
    assert str(tmp_path) not in text
    assert not list(tmp_path.glob("**/pack/*.gguf"))
    assert verify(tmp_path / "pack", shards_of(MODEL)).passed
    report = verify(tmp_path / "pack", f"hf://{REPOSITORY}/UD-Q4_K_XL", sha256=True)
    assert report.passed
    assert report.compared_length == verify(local, shards_of(MODEL)).compared_length


def test_a_file_that_only_the_hub_s_client_reads_is_refused_with_its_command(hub: FakeHub) -> None:
    path = resolve(f"hf://{REPOSITORY}/mmproj-F16.gguf")
    check_length(path, RemoteStamp(400 * 10**9))
    with pytest.raises(SourceError, match="only the hub's own client") as refusal:
        check_length(path, RemoteStamp(401 * 10**9))
    command = f"`hf download {REPOSITORY} mmproj-F16.gguf --revision {hub.commit}`"
    assert command in str(refusal.value.hint)


def test_a_token_goes_to_the_hub_and_nowhere_else(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private.add(REPOSITORY)
    hub.tokens.add("hf_secret")
    with pytest.raises(SourceError, match="no such model on the hub") as refusal:
        open_source(f"hf://{REPOSITORY}")
    assert "HF_TOKEN" in str(refusal.value.hint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pack_model(f"hf://{REPOSITORY}", tmp_path / "pack")
    assert all("Authorization" in map(str.title, each) for each in hub.traffic.headers[1:])
    assert not any("Authorization" in map(str.title, each) for each in hub.content.traffic.headers)
    assert not any(b"hf_secret" in data for data in contents(tmp_path / "pack").values())
    hub.gated.add(REPOSITORY)
    forget_stores()
    with pytest.raises(SourceError, match="a gated model") as refusal:
        open_source(f"hf://{REPOSITORY}")
    assert "accept its terms" in str(refusal.value.hint)


@pytest.mark.parametrize(
    "inner",
    [
        *("", "/UD-Q4_K_XL", "/ud-q4_k_xl", f"/UD-Q4_K_XL/{Path(shards_of(MODEL)[2]).name}"),
        f"@{FakeHub.commit}/UD-Q4_K_XL",
        f"/UD-Q4_K_XL@{FakeHub.commit}",
    ],
)
def test_a_model_is_found_by_its_folder_quantisation_or_shard(hub: FakeHub, inner: str) -> None:
    source = open_source(f"hf://{REPOSITORY}{inner}")
    names = [os.path.basename(shard.path) for shard in source.shards]
    assert names == [os.path.basename(path) for path in shards_of(MODEL)]
    assert all(shard.path.startswith(f"hf://{REPOSITORY}@{hub.commit}/") for shard in source.shards)


def test_several_models_are_listed_with_their_sizes(hub: FakeHub) -> None:
    folder = hub.folder / REPOSITORY / "Q8_0"
    folder.mkdir()
    for name in ("granite-Q8_0.gguf", "other-Q8_0.gguf"):
        shutil.copy(shards_of("granite")[0], folder / name)
    with pytest.raises(SourceError, match="2 models here") as refusal:
        open_source(f"hf://{REPOSITORY}/Q8_0")
    notes = "\n".join(refusal.value.__notes__)
    assert f"hf://{REPOSITORY}@{hub.commit}/Q8_0/granite-Q8_0.gguf  " in notes
    with pytest.raises(SourceError, match="no such model here, found UD-Q4_K_XL|found Q8_0"):
        open_source(f"hf://{REPOSITORY}/IQ1_S")


def test_of_several_models_a_repository_s_name_means_the_usual_one(hub: FakeHub) -> None:
    (hub.folder / REPOSITORY / "other-Q8_0.gguf").write_bytes(b"GGUF")
    assert resolve(f"hf://{REPOSITORY}").key == ""
    assert find_remote_shards(f"hf://{REPOSITORY}")[0].name == Path(shards_of(MODEL)[0]).name
    (hub.folder / REPOSITORY / "other-Q4_K_M.gguf").write_bytes(b"GGUF")
    forget_stores()
    with pytest.raises(SourceError, match="2 models here"):
        find_remote_shards(f"hf://{REPOSITORY}")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("hf://someone", "not an address of the hub"),
        (f"hf://{REPOSITORY}-2", "no such model on the hub"),
        (f"hf://{REPOSITORY}@v9", "no such revision, found v9"),
        ("https://127.0.0.1:1/model", "not the address of a GGUF"),
        ("https://host/x.gguf?sig=1", "with a query"),
    ],
)
def test_addresses_of_nothing_are_refused(hub: FakeHub, address: str, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        open_source(address)


@pytest.mark.parametrize(("refused", "cut", "status"), [(0, 12, 503), (12, 12, 503), (20, 0, 403)])
def test_refused_and_cut_answers_still_give_the_same_pack(
    refused: int, cut: int, status: int, hub: FakeHub, local: Path, tmp_path: Path
) -> None:
    """Of a hundred answers so many are refused, and so many cut off; 403 is an expired address."""
    hub.content.status = status

    def fault(number: int) -> Fault:
        draw = number * 37 % 100
        return "status" if draw < refused else "cut" if draw < refused + cut else None

    hub.content.fault = fault
    pack_model(f"hf://{REPOSITORY}", tmp_path / "pack")
    assert not differing(tmp_path / "pack", local)


def test_a_hub_that_keeps_refusing_is_given_up_after_all_pauses(hub: FakeHub) -> None:
    hub.content.fault, hub.content.status = lambda number: "status", 403
    path = resolve(f"hf://{REPOSITORY}/README.md")
    for read in (
        lambda: store_of(path).read(path.key, 5),
        lambda: list(open_input(path).stream(0, 5)),
    ):
        hub.content.traffic.requests.clear()
        with pytest.raises(RemoteError, match="403 Forbidden") as refusal:
            read()
        assert "HF_TOKEN" in str(refusal.value.hint)
        assert len(hub.content.traffic.gets()) == 1 + len(remote_store.PAUSES)


@pytest.mark.parametrize(
    ("fault", "problem"), [("other bytes", "SHA-256 differs"), ("status", "no such object")]
)
def test_a_fault_at_the_end_commits_nothing_and_finished_files_stay(
    fault: Fault, problem: str, hub: FakeHub, local: Path, tmp_path: Path
) -> None:
    pack_model(f"hf://{REPOSITORY}", tmp_path / "whole", threads=1)
    last = 2 * len(hub.content.traffic.gets()) - 1
    hub.content.fault = lambda number: fault if number == last else None
    hub.content.status = 404
    with pytest.raises(SourceError, match=problem):
        pack_model(f"hf://{REPOSITORY}", tmp_path / "pack", threads=1)
    finished = sorted(path.name for path in (tmp_path / "pack").glob("*.bin"))
    assert finished
    if fault == "other bytes":
        with pytest.raises(SourceError, match=problem):
            pack_model(f"hf://{REPOSITORY}", tmp_path / "pack", resume=True)
        assert not (tmp_path / "pack" / "manifest.json").exists()
    else:
        summary = pack_model(f"hf://{REPOSITORY}", tmp_path / "pack", resume=True)
        assert summary.resumed_file_count == len(finished)
        assert not differing(tmp_path / "pack", local)


def test_long_ranges_are_asked_for_never_one_an_expert(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "RANGE_LENGTH", 8 << 20)
    summary = pack_model(f"hf://{REPOSITORY}", tmp_path / "pack")
    resolved = [request for request in hub.traffic.gets() if "/resolve/" in request[1]]
    shard_count = len(shards_of(MODEL))
    assert len(resolved) <= 4 * shard_count < summary.blob_count, "headers twice, and the tensors"


def test_what_needs_files_of_this_machine_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not possible for a model that is elsewhere"):
        pack_in_place(f"hf://{REPOSITORY}", tmp_path / "pack")
    with pytest.raises(SourceError, match="not on this machine") as refusal:
        index_model(f"hf://{REPOSITORY}", tmp_path / "index")
    assert "moepack pack hf://" in str(refusal.value.hint)
    assert not (tmp_path / "pack").exists()


def test_a_web_server_is_a_source_as_well(local: Path, tmp_path: Path) -> None:
    with file_server(FIXTURES) as server:
        pack_model(f"{server.url}/{first_shard(MODEL).name}", tmp_path / "pack")
    assert not differing(tmp_path / "pack", local)
