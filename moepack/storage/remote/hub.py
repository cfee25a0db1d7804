"""The Hugging Face hub: the files of a repository, at one commit.

Facts, of the hub in 2026: `/resolve/COMMIT/FILE` redirects to a host whose address is signed for
one exact range, so ranges are asked of the hub itself, and long ones: it allows some 3,000 in five
minutes. A file's SHA-256 and length are in the repository's list of files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moepack.common import extras
from moepack.common.errors import MachineError, SourceError
from moepack.storage.remote.store import CERTIFICATE_HINT, RemoteStamp

_ADDRESS = re.compile(
    r"hf://(?:models/)?(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
    r"(?:@(?P<revision>[^/@]+))?(?:[/:](?P<inner>[^@]*))?(?:@(?P<last>[^/@]+))?\Z",
    re.IGNORECASE,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TOKEN_HINT = "log in with `hf auth login`, or set HF_TOKEN"


class Repository(NamedTuple):
    """A repository at a commit: its files by name."""

    root: str
    files: dict[str, RemoteStamp]


def parse(address: str) -> tuple[str, str, str]:
    """Return repository, revision and inner of `hf://OWNER/NAME[@REVISION][/INNER][@REVISION]`.

    The inner is a file, a folder or a quantisation, empty for all. Raises SourceError.
    """
    match = _ADDRESS.match(address)
    is_one = match is not None and not (match["revision"] and match["last"])
    is_one = is_one and address.isprintable()
    if match is None or not is_one or ".." in (match["inner"] or "").split("/"):
        expected = "hf://OWNER/NAME/QUANTISATION@COMMIT, or hf://OWNER/NAME@COMMIT/FILE"
        raise SourceError("not an address of the hub", path=address, expected=expected)
    revision = match["revision"] or match["last"] or "main"
    inner = (match["inner"] or "").strip("/")
    return f"{match['owner']}/{match['name']}", revision, inner


_repositories: dict[str, Repository] = {}
"""The answers of the hub to this process, by revision and by commit."""


def repository(root: str) -> Repository:
    """Ask for commit and files of `hf://OWNER/NAME@REVISION`. Raises SourceError, MachineError."""
    if root not in _repositories:
        answer = _ask(*_split(root))
        _repositories[root] = _repositories[answer.root] = answer
    return _repositories[root]


def forget_repositories() -> None:
    """Forget the lists of files."""
    _repositories.clear()


def _ask(name: str, revision: str) -> Repository:
    extras.require("remote")
    from huggingface_hub import HfApi

    address = f"hf://{name}"
    with _translated(address, revision):
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
    files = {
        file.rfilename: RemoteStamp(file.size, None, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
        if file.size is not None
    }
    return Repository(f"{address}@{info.sha}", files)


@contextmanager
def _translated(address: str, revision: str) -> Iterator[None]:
    """Turn the errors of the hub's client into SourceError and MachineError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        hint = f"accept its terms on its page, then {_TOKEN_HINT}"
        raise SourceError("a gated model", path=address, hint=hint) from None
    except errors.RevisionNotFoundError:
        raise SourceError("no such revision", path=address, found=revision) from None
    except errors.RepositoryNotFoundError:
        hint = f"see how it is spelt; if it is private, {_TOKEN_HINT}"
        raise SourceError("no such model on the hub", path=address, hint=hint) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        raise MachineError(f"the hub answers {status or 'nothing'}", path=address) from None
    except Exception as error:  # of its HTTP library, which may be another tomorrow
        if "CERTIFICATE_VERIFY_FAILED" in str(error):  # OpenSSL's name
            problem = "the certificate of the hub is not trusted"
            raise MachineError(problem, path=address, hint=CERTIFICATE_HINT) from None
        problem = f"the hub cannot be reached: {type(error).__name__}"
        is_set = os.environ.get("HF_ENDPOINT")
        hint = "is HF_ENDPOINT right?" if is_set else "see whether the network is up"
        raise MachineError(problem, path=address, hint=hint) from None


def _split(root: str) -> tuple[str, str]:
    name, _, commit = root.removeprefix("hf://").rpartition("@")
    return name, commit


def is_commit(revision: str) -> bool:
    """Return whether a revision is a commit, which never changes."""
    return bool(_COMMIT.fullmatch(revision))


def cached_ggufs() -> Iterator[tuple[str, Path, list[Path]]]:
    """Yield each repository in the hub's own cache: its name, its folder and its GGUFs."""
    folder = cache_folder("*/*")
    for repository in sorted(folder.parent.glob(folder.name)) if folder is not None else ():
        ggufs = {path.resolve() for path in repository.glob("snapshots/*/**/*.gguf")}
        if files := sorted(path for path in ggufs if path.is_file()):
            yield "/".join(repository.name.split("--")[1:]), repository, files


def cache_folder(name: str) -> Path | None:
    """Return the folder of a repository in the hub's own cache; None without the hub's client."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def files_request(root: str) -> tuple[str, dict[str, str]]:
    """Return the address that the files of a root are below, and the headers."""
    from huggingface_hub import constants, get_token

    name, commit = _split(root)
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return f"{constants.ENDPOINT}/{name}/resolve/{commit}", headers
