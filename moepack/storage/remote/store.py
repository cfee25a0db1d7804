"""A store of objects: their lengths, ranges of their bytes, their names, and new ones."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from moepack.storage.remote.calls import pause, wait_for

if TYPE_CHECKING:
    from obstore import BytesStream, GetOptions, GetResult
    from obstore.store import ObjectStore

_T = TypeVar("_T")

PAUSES = (1.0, 4.0, 15.0, 60.0)
"""Seconds before each further attempt, once the client's own retries have come to their end."""
_CHUNK_LENGTH = 1 << 20
UPLOAD_LENGTH = 16 << 20
"""Bytes of a part of an upload: S3 takes 10,000 of them."""
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z -]*\w)")
_REASON = re.compile(r".*HTTP error: (.*)")
_INTERRUPTED = "the connection was cut off"
_CUT_OFF = re.compile("kind: Interrupted|UnexpectedRange")
_NO_RANGE = re.compile("NotPartial|RangeNotSupported")
_INNER_ERROR = re.compile(r"Server returned error response: .*?<Code>(\w+)</Code>")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_QUERY = re.compile(r"(https?://[^\s?\"')]*)\?[^\s\"')]*")
_HINTS = {
    "401": "the store wants credentials: set those of its scheme in the environment",
    "403": "no credentials in the environment allow it (for the hub: HF_TOKEN)",
    "429": "the server limits requests: wait some minutes, then go on with `resume=True`",
}
_EXPIRED_HINT = "it was allowed before: the link or the credentials may have expired"
_NETWORK_HINT = "see whether the address is right and the network is up"
CERTIFICATE_HINT = (
    "if you trust its certificate authority, name the file of that in SSL_CERT_FILE (PEM)"
)


class RemoteError(OSError):
    """A store has not done what it was asked for; `hint` is the next step."""

    hint: str | None = None


class RemoteStamp(NamedTuple):
    """The facts of an object that change when it is replaced; None if the store states none."""

    length: int
    etag: str | None = None
    sha256: str | None = None


class Store:
    """The objects under one root. Its calls may be made from several threads.

    They raise RemoteError, FileNotFoundError if there is no such object, and FileExistsError.
    `stamps` are those of all objects, which the hub alone lists.
    """

    def __init__(self, client: ObjectStore, stamps: Mapping[str, RemoteStamp] | None) -> None:
        self._client = client
        self._stamps = stamps
        self._retried = ("429",) if stamps is None else ("403", "429")
        self._process = os.getpid()
        self._allowed: set[str] = set()

    def stamp(self, key: str) -> RemoteStamp:
        """Return the length and the identity of an object."""
        if self._stamps is not None:
            if key not in self._stamps:
                raise _failure_of(errno.ENOENT, "no such object")
            return self._stamps[key]
        import obstore

        meta = self._call(lambda: wait_for(lambda: obstore.head_async(self._client, key)), key)
        self._allowed.add(key)
        return RemoteStamp(meta["size"], meta["e_tag"])

    def read(self, key: str, limit: int) -> bytes:
        """Return all bytes of an object, at most `limit` and one more."""
        buffer = memoryview(bytearray(limit + 1))
        length, _ = self.read_into(key, 0, [buffer])
        return bytes(buffer[:length])

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], stamp: RemoteStamp | None = None
    ) -> tuple[int, RemoteStamp]:
        """Fill buffers, one after the other, with an object's bytes from `offset` on.

        It is one request. Returns the bytes read, fewer only where the object ends, and its stamp.
        Raises RemoteError as well if it has another stamp than `stamp`.
        """
        length = sum(map(len, buffers))

        def request() -> tuple[int, RemoteStamp]:
            answer = self._get(key, offset, offset + length)
            current = RemoteStamp(answer.meta["size"], answer.meta["e_tag"])
            filled = _fill(buffers, _pieces(answer))
            _check_length(filled, max(0, min(length, current.length - offset)))
            return filled, current

        filled, current = self._call(request, key)
        if stamp is not None:
            _check_unchanged(current, stamp)
        return filled, current

    def stream(self, key: str, offset: int, length: int, stamp: RemoteStamp) -> Iterator[bytes]:
        """Yield exactly `length` bytes of an object from `offset` on, piece by piece.

        An interrupted body is resumed where it stopped: interruptions count only if no byte came
        between them. Raises RemoteError as well if the object does not have its stamp any more.
        """
        end, attempt = offset + length, 0
        while offset < end:
            try:
                for piece in self._body(key, offset, end, stamp):
                    offset, attempt = offset + len(piece), 0
                    yield piece
            except Exception as error:
                _wait_after(self._failure(error, key), attempt, self._retried)
                attempt += 1

    def _body(self, key: str, offset: int, end: int, stamp: RemoteStamp) -> Iterator[bytes]:
        """Yield the body of one answer. Raises if it has other bytes than were asked for."""
        _check_process(self._process)
        answer = self._get(key, offset, end)
        _check_unchanged(RemoteStamp(answer.meta["size"], answer.meta["e_tag"]), stamp)
        length = 0
        for piece in _pieces(answer):
            length += len(piece)
            if length > end - offset:
                break
            yield piece
        _check_length(length, end - offset)

    def _get(self, key: str, start: int, end: int) -> GetResult:
        """Return the beginning of the answer for a range."""
        import obstore

        options: GetOptions = {"range": (start, end)}
        answer = wait_for(lambda: obstore.get_async(self._client, key, options=options))
        self._allowed.add(key)
        return answer

    def objects(self, prefix: str) -> Iterator[tuple[str, RemoteStamp]]:
        """Yield the objects below a folder, and their stamps."""
        import obstore

        folder = f"{prefix}/" if prefix else None
        for meta in self._call(
            lambda: wait_for(lambda: obstore.list(self._client, folder).collect_async())
        ):
            yield meta["path"], RemoteStamp(meta["size"], meta["e_tag"])

    def put(self, key: str, data: bytes | memoryview, *, new: bool = False) -> None:
        """Write an object whole; with `new` raise FileExistsError if there is one already."""
        import obstore

        self._call(
            lambda: obstore.put(self._client, key, data, mode="create" if new else "overwrite")
        )

    def upload(self, key: str, path: Path) -> RemoteStamp:
        """Write a file of this machine as an object, in several parts at a time; return its stamp.

        What the store has is compared with the file: by its ETag, if that is the MD5 of the parts,
        otherwise by reading the object.
        """
        import obstore

        def request() -> None:
            try:
                obstore.put(self._client, key, path, chunk_size=UPLOAD_LENGTH, max_concurrency=8)
            except FileNotFoundError:
                if not path.exists():
                    raise
                # Its last answer was lost: the client asks again, and the upload is gone.
                problem = "the end of an upload got no answer that says how it went"
                raise _failure_of(errno.ECONNRESET, problem, _NETWORK_HINT) from None

        self._call(request)
        stamp, length = self.stamp(key), path.stat().st_size
        if stamp.length != length:
            raise _failure_of(errno.EIO, f"stored {stamp.length:,} of {length:,} bytes")
        if (stamp.etag or "").strip('"') != md5_etag(path):
            with open(path, "rb") as file:
                pieces = self.stream(key, 0, stamp.length, stamp)
                if not all(file.read(len(piece)) == piece for piece in pieces):
                    problem = "the store has other bytes than were sent"
                    raise _failure_of(errno.EIO, problem, "the store or the memory is failing")
        return stamp

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: obstore.delete(self._client, key))

    def _call(self, request: Callable[[], _T], key: str | None = None) -> _T:
        _check_process(self._process)
        attempt = 0
        while True:
            try:
                return request()
            except Exception as error:
                _wait_after(self._failure(error, key), attempt, self._retried)
                attempt += 1

    def _failure(self, error: Exception, key: str | None) -> OSError:
        """Return the error for one of the client's; a key that was allowed before is named so."""
        failure = _translated(error)
        # The hub allows all files of a repository, or none.
        was_allowed = self._allowed if self._stamps is not None else key in self._allowed
        if was_allowed and isinstance(failure, RemoteError) and failure.errno == errno.EACCES:
            failure.hint = _EXPIRED_HINT
        return failure


def md5_etag(path: Path) -> str:
    """Return the ETag that S3 gives to an upload of a file: of its MD5, or those of its parts."""
    parts = []
    with open(path, "rb") as file:
        while data := file.read(UPLOAD_LENGTH):
            parts.append(hashlib.md5(data, usedforsecurity=False))
    if len(parts) < 2:
        return parts[0].hexdigest() if parts else ""
    whole = hashlib.md5(b"".join(part.digest() for part in parts), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(parts)}"


def _check_process(process: int) -> None:
    """Raise RemoteError in a forked child of a process: a client's threads are not there."""
    if os.getpid() != process:
        problem, hint = "stores cannot be used in a forked process", "start workers by `spawn`"
        raise _failure_of(errno.ENOTSUP, problem, f"{hint}, not by `fork`")


def _wait_after(failure: OSError, attempt: int, retried: Sequence[str]) -> None:
    """Wait before another attempt; raise a failure but for cut connections and those `retried`."""
    status = str(failure.strerror).partition(" ")[0]
    is_passing = failure.errno == errno.ECONNRESET or status in retried
    if attempt == len(PAUSES) or not is_passing:
        raise failure from None
    pause(PAUSES[attempt])


def _pieces(answer: GetResult) -> Iterator[bytes]:
    """Yield the body of an answer."""
    stream: BytesStream = answer.stream(min_chunk_size=_CHUNK_LENGTH)
    while piece := wait_for(lambda: anext(stream, b"")):
        yield piece


def _check_length(length: int, expected: int) -> None:
    """Raise RemoteError if a body is shorter than its range, as if it was cut off, or longer."""
    if length < expected:
        raise _failure_of(errno.ECONNRESET, _INTERRUPTED, _NETWORK_HINT)
    if length > expected:
        raise _failure_of(errno.EPROTO, "the server sends more bytes than were asked for")


def _fill(buffers: Sequence[memoryview], pieces: Iterable[bytes]) -> int:
    """Copy pieces into buffers, one after the other; return their bytes, even if they are more."""
    filled = 0
    targets = iter(buffers)
    target: memoryview | None = next(targets, None)
    for each in pieces:
        piece = memoryview(each)
        filled += len(piece)
        while len(piece) and target is not None:
            length = min(len(target), len(piece))
            target[:length] = piece[:length]
            target, piece = target[length:], piece[length:]
            if not len(target):
                target = next(targets, None)
    return filled


def _check_unchanged(current: RemoteStamp, stamp: RemoteStamp) -> None:
    """Raise RemoteError for an object with another stamp; ETags count if both sides state one."""
    is_other = stamp.etag and current.etag and stamp.etag != current.etag
    if is_other or stamp.length != current.length:
        raise _failure_of(errno.ESTALE, "the file changed while it was being read")


def _translated(error: Exception) -> OSError:
    """Return the error for one of the client's, whose texts have addresses and whole pages."""
    import obstore.exceptions as kinds

    if isinstance(error, RemoteError):
        return error
    if isinstance(error, FileNotFoundError):
        return _failure_of(errno.ENOENT, "no such object")
    if isinstance(error, kinds.AlreadyExistsError):
        return _failure_of(errno.EEXIST, "there is one already")
    if not isinstance(error, OSError | kinds.BaseError):
        raise error
    text = _QUERY.sub(r"\1?…", str(error).partition("\n")[0])
    if status := _STATUS.search(text):
        code = status[1][:3]
        number = errno.EACCES if code in ("401", "403") else errno.EIO
        return _failure_of(number, status[1], _HINTS.get(code))
    if certificate := _CERTIFICATE.search(str(error)):
        problem = f"the certificate of the server is not trusted: {certificate[1]}"
        return _failure_of(errno.EACCES, problem, CERTIFICATE_HINT)
    if _CUT_OFF.search(str(error)):
        return _failure_of(errno.ECONNRESET, _INTERRUPTED, _NETWORK_HINT)
    if _NO_RANGE.search(str(error)):
        problem = "the server answers 200 OK with something else than the range asked for"
        hint = "it has no ranges, or the answer is the text of an error: open the address to see"
        return _failure_of(errno.EIO, problem, hint)
    if inner := _INNER_ERROR.search(str(error)):
        return _failure_of(errno.EIO, f"200 OK with an error inside: {inner[1]}")
    reason = _REASON.search(text)
    return _failure_of(errno.EIO, reason[1] if reason else text, _NETWORK_HINT)


def _failure_of(number: int, problem: str, hint: str | None = None) -> OSError:
    """Return the error of this room for an errno, with the next step."""
    if number == errno.ENOENT:
        return FileNotFoundError(number, problem)
    if number == errno.EEXIST:
        return FileExistsError(number, problem)
    failure = RemoteError(number, problem)
    failure.hint = hint
    return failure
