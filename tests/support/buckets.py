"""A bucket of moto's S3, with its semantics of conditional writes and uploads in parts."""

import contextlib
import os
import urllib.request
from collections.abc import Iterator

import pytest

from moepack.common.paths import RemotePath
from moepack.storage.remote.stores import forget_stores, store_of
from tests.support.remote_servers import FaultyStore


@contextlib.contextmanager
def bucket_of_moto() -> Iterator[str]:
    """Serve an empty bucket for the block; yield its address. The environment names the server."""
    pytest.importorskip("obstore")
    moto = pytest.importorskip("moto.server")
    forget_stores()
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        host, port = server.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        # Its buckets outlive a server, for as long as the process.
        for method, path in (("POST", "moto-api/reset"), ("PUT", "bucket")):
            request = urllib.request.Request(f"http://{host}:{port}/{path}", method=method)
            urllib.request.urlopen(request, timeout=10).close()
        yield "s3://bucket"
    server.stop()
    forget_stores()


def objects(address: str) -> dict[str, bytes]:
    """Read all objects of a folder, by their names in it."""
    path = RemotePath(address)
    store = store_of(path)
    return {
        key.removeprefix(f"{path.key}/"): store.read(key, stamp.length)
        for key, stamp in store.objects(path.key)
    }


@contextlib.contextmanager
def faulty_bucket() -> Iterator[tuple[str, FaultyStore]]:
    """Serve an empty bucket behind a network that can be made faulty."""
    with bucket_of_moto() as address, pytest.MonkeyPatch.context() as patch:
        port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
        with contextlib.closing(FaultyStore(port)) as network:
            patch.setenv("AWS_ENDPOINT_URL", network.url)
            forget_stores()
            yield address, network
