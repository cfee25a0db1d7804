"""The store that an address lies in, with its credentials as obstore and the hub take them."""

import os
import re
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.common import extras
from moepack.common.errors import MachineError, SourceError
from moepack.common.path_hints import hub_address
from moepack.common.paths import AnyPath, RemotePath, parse_address
from moepack.common.sizes import size_text
from moepack.storage.remote import hub
from moepack.storage.remote.store import RemoteStamp, Store
from moepack.version import __version__

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig

_STALLED = timedelta(seconds=30)
"""After so long without a byte, a request is made once more."""
BACKOFF: "BackoffConfig" = {"init_backoff": timedelta(milliseconds=100)}
"""The client's first pause before it asks again; each is twice the one before."""
_MAX_PLAIN_LENGTH = 400 * 10**9
"""The hub sends no longer files over plain HTTP."""
_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def resolve(address: AnyPath) -> RemotePath:
    """Return an address as a path; one of the hub with the commit that its revision is now.

    Raises SourceError if it is not understood, MachineError if the hub cannot be asked.
    """
    text = named_on_hub(os.fspath(address))
    if text.lower().startswith("hf:"):
        name, revision, inner = hub.parse(text)
        return RemotePath(hub.repository(f"hf://{name}@{revision}").root) / inner
    try:
        return parse_address(text)
    except ValueError as error:
        raise SourceError(str(error), path=text) from None


def named_on_hub(address: str) -> str:
    """Return the `hf://` address of a page of the hub, and any other address as it is."""
    return (_HUB_PAGE.match(address) and hub_address(address)) or address


@lru_cache(maxsize=64)
def _store(root: str) -> Store:
    extras.require("remote")
    from obstore.store import HTTPStore, from_url

    address, endpoint, files = root, root, None
    headers: dict[str, str] = {}
    if root.startswith("hf:"):
        files = hub.repository(root).files
        address, headers = hub.files_request(root)
        endpoint = address
    elif not root.startswith("http"):
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    options: ClientConfig = {
        "user_agent": f"moepack/{__version__}",
        "connect_timeout": _STALLED,
        "read_timeout": _STALLED,
        "timeout": timedelta(hours=1),
        "pool_max_idle_per_host": "64",
        "default_headers": headers,
        "allow_http": endpoint.startswith("http:"),
    }
    certificates = os.environ.get("SSL_CERT_FILE")
    try:
        if certificates:
            options["root_certificate"] = Path(certificates).read_bytes()
        is_web = address.startswith("http")
        make = HTTPStore.from_url if is_web else from_url
        client = make(address, client_options=options, retry_config={"backoff": BACKOFF})
    except Exception as error:  # of a library in Rust, about its settings
        problem = f"the store cannot be set up: {str(error).partition(chr(10))[0]}"
        is_about_it = certificates and (isinstance(error, OSError) or "certificate" in problem)
        hint = "is SSL_CERT_FILE a file of certificates (PEM)?" if is_about_it else None
        raise MachineError(problem, path=root, hint=hint) from None
    return Store(client, files)


def store_of(path: RemotePath) -> Store:
    """Return the store of an address; one for each root in this process. Raises MachineError."""
    return _store(path.store)


def check_length(path: RemotePath, stamp: RemoteStamp) -> None:
    """Raise SourceError for a file that the hub sends to no client but its own."""
    if path.store.startswith("hf:") and stamp.length > _MAX_PLAIN_LENGTH:
        problem = f"a file of {size_text(stamp.length)}, which only the hub's own client reads"
        name, _, commit = path.store.removeprefix("hf://").rpartition("@")
        hint = f"`hf download {name} {path.key} --revision {commit}`, and name the file there"
        raise SourceError(problem, path=path, hint=hint)


def forget_stores() -> None:
    """Forget all stores and lists of files, and so the credentials that they were made with."""
    _store.cache_clear()
    hub.forget_repositories()
