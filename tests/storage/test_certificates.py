"""Servers whose certificates an authority of one's own has signed: stores, web servers, the hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moepack.common.errors import MachineError, MoepackError
from moepack.common.paths import parse_address
from moepack.packing.pack_model import pack_model
from moepack.source.shards import open_source
from moepack.storage.input_file import open_input
from moepack.storage.remote.store import RemoteError
from moepack.storage.remote.stores import forget_stores
from tests.support.certificates import Authority, authority_in
from tests.support.hubs import REPOSITORY, hub_of
from tests.support.models import FIXTURES, first_shard, shards_of
from tests.support.remote_servers import file_server

pytest.importorskip("obstore")

MODEL = "qwen3moe"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority_in(tmp_path_factory.mktemp("certificates"))


def forget_clients() -> None:
    """Forget the clients of this process: each reads the certificates when it is made."""
    pytest.importorskip("huggingface_hub").close_session()
    forget_stores()


@pytest.fixture(autouse=True)
def _only_known_authorities(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    forget_clients()
    yield
    forget_clients()


def test_a_server_that_nobody_vouches_for_is_refused_with_a_way_out(authority: Authority) -> None:
    with file_server(FIXTURES, authority.context) as server:
        address = f"{server.url}/{first_shard(MODEL).name}"
        with pytest.raises(RemoteError, match="certificate of the server is not trusted") as error:
            open_input(parse_address(address))
        assert "SSL_CERT_FILE" in str(error.value.hint)
        with pytest.raises(MoepackError, match="certificate of the server is not") as failure:
            open_source(address)
        assert "SSL_CERT_FILE" in str(failure.value.hint)
        assert not server.traffic.requests


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_without_certificates_is_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "authority.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MachineError, match="the store cannot be set up") as error:
        open_input(parse_address("https://127.0.0.1:1/model.gguf"))
    assert "SSL_CERT_FILE" in str(error.value.hint)


def test_a_token_stays_with_a_hub_that_is_trusted(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of(tmp_path / "hub", monkeypatch, shards_of(MODEL), "", authority.context) as hub:
        hub.private.add(REPOSITORY)
        hub.tokens.add("hf_secret")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        with pytest.raises(MachineError, match="the certificate of the hub is not trusted") as no:
            open_source(f"hf://{REPOSITORY}")
        assert "SSL_CERT_FILE" in str(no.value.hint)
        assert not hub.traffic.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        forget_clients()
        pack_model(f"hf://{REPOSITORY}", tmp_path / "pack")
        assert hub.traffic.requests
        assert hub.content.url.startswith("https://127.0.0.1")
        assert "hf_secret" not in str(hub.content.traffic.headers)
