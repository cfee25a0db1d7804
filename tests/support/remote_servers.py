"""Servers with faults: of files, a hub whose files lie elsewhere, and a network to a store."""

import contextlib
import functools
import hashlib
import http.client
import json
import random
import re
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

Fault = Literal["status", "cut", "stall", "short", "less", "other bytes", "error inside"] | None
_RANGE = re.compile(r"bytes=(\d+)-(\d*)\Z")


@dataclass
class Traffic:
    """What came to a server, in order: method, path and range of each request, and bytes sent."""

    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent_length: int = 0

    def gets(self) -> list[tuple[str, str, str | None]]:
        return [request for request in self.requests if request[0] == "GET"]


class Server:
    """A server on this machine, with faults: `status` is the answer of the one of that name."""

    host = "127.0.0.1"

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.status = 503
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._server = _start(self._handle, tls)
        self.url = f"{'https' if tls else 'http'}://{self.host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    def _note(self, request: BaseHTTPRequestHandler, path: str) -> int:
        """Note a request; return its number among those of its method."""
        with self._lock:
            self.traffic.requests.append((request.command, path, request.headers.get("Range")))
            self.traffic.headers.append(dict(request.headers))
            return sum(one[0] == request.command for one in self.traffic.requests) - 1


class FileServer(Server):
    """Serves a folder by ranges; `fault` says what goes wrong with the Nth GET, `delay` how slowly.

    `head_fault` is what goes wrong with each HEAD. With `signed`, each request needs the signature
    of its exact range; with `tls` it is one of https.
    """

    def __init__(
        self, folder: Path, *, signed: bool = False, tls: ssl.SSLContext | None = None
    ) -> None:
        self.folder = folder
        self.fault: Callable[[int], Fault] = lambda number: None
        self.head_fault: Fault = None
        self.delay = 0.0
        self.signed = signed
        super().__init__(tls)

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        path = self.folder / unquote(parts.path).lstrip("/")
        asked = request.headers.get("Range")
        number = self._note(request, parts.path)
        time.sleep(self.delay)
        if self.signed and parse_qs(parts.query).get("for") != [signature(asked)]:
            return _answer(request, 403, b"signed for another range")
        fault = self.fault(number) if request.command == "GET" else self.head_fault
        if fault == "status":
            return _answer(request, self.status, b"<html>later</html>")
        if not path.is_file():
            return _answer(request, 404, b"none")
        if fault == "error inside":
            return _answer(request, 200, b"<Error><Code>InternalError</Code></Error>")
        self._send(request, path, asked, fault)

    def _send(
        self, request: BaseHTTPRequestHandler, path: Path, asked: str | None, fault: Fault
    ) -> None:
        length = path.stat().st_size
        match = _RANGE.match(asked or "")
        start = int(match[1]) if match else 0
        end = min(int(match[2]) + 1 if match and match[2] else length, length)
        if start >= length:
            return _answer(request, 416, b"")
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(end - start) if request.command == "GET" else b""
        if fault == "other bytes":
            body = bytes(byte ^ 1 for byte in body[:1]) + body[1:]
        sent_length = end - start
        if fault in ("short", "less"):  # the range says so, or is that of the request
            sent_length //= 2
            body, end = body[:sent_length], end if fault == "less" else start + sent_length
        request.send_response(206 if match else 200)
        request.send_header("Content-Length", str(sent_length))
        request.send_header("ETag", f'"{path.stat().st_mtime_ns:x}-{length:x}"')
        request.send_header("Last-Modified", "Mon, 02 Nov 2026 00:00:00 GMT")
        request.send_header("Accept-Ranges", "bytes")
        if match:
            request.send_header("Content-Range", f"bytes {start}-{end - 1}/{length}")
        request.end_headers()
        if fault in ("cut", "stall"):
            request.wfile.write(body[: len(body) // 2])
            request.wfile.flush()
            if fault == "stall":
                time.sleep(60)
            request.close_connection = True
            return
        request.wfile.write(body)
        with self._lock:
            self.traffic.sent_length += len(body)


class FakeHub(Server):
    """A hub with one repository per folder `OWNER/NAME`; its files are sent by another host.

    `tokens` may read what is private; `gated` are repositories that nobody was let into yet.
    """

    host = "localhost"
    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None) -> None:
        self.folder = folder
        self.tokens: set[str] = set()
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.content = FileServer(folder, signed=True, tls=tls)
        super().__init__(tls)

    def close(self) -> None:
        self.content.close()
        super().close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        asked = request.headers.get("Range")
        self._note(request, path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self._list(request, match[1], match[2] or "main")
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match is None or not self._may_read(request, match[1]):
            return _answer(request, 404, b"none")
        file = self.folder / match[1] / match[3]
        if match[2] != self.commit or not file.is_file():
            return _answer(request, 404, b"none")
        request.send_response(302)
        request.send_header(
            "Location", f"{self.content.url}/{match[1]}/{match[3]}?for={signature(asked)}"
        )
        request.send_header("X-Repo-Commit", self.commit)
        request.send_header("X-Linked-Size", str(file.stat().st_size))
        request.send_header("X-Linked-Etag", f'"{sha256(file)}"')
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _may_read(self, request: BaseHTTPRequestHandler, name: str) -> bool:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return name not in self.gated and (name not in self.private or token in self.tokens)

    def _list(self, request: BaseHTTPRequestHandler, name: str, revision: str) -> None:
        folder = self.folder / name
        if name in self.gated:
            return _answer(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        if not folder.is_dir() or not self._may_read(request, name):
            return _answer(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", self.commit):
            return _answer(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [
            {
                "rfilename": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "lfs": {"sha256": sha256(path), "size": path.stat().st_size, "pointerSize": 134},
            }
            for path in files
        ]
        body = {"id": name, "modelId": name, "sha": self.commit, "private": False, "gated": False}
        body |= {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
        return _answer(request, 200, json.dumps(body).encode())


StoreFault = (
    Literal["status", "error inside", "cut", "request cut", "lost", "slow", "zeroed"] | None
)


class FaultyStore(Server):
    """Passes requests on to a store; `fault` says what goes wrong with each, by method and path.

    One whose request is cut never reaches the store; one whose answer is cut or lost was carried
    out; of one that is zeroed it stores zeros. `faults` are those that happened.
    """

    def __init__(self, port: int) -> None:
        self.fault: Callable[[str, str], StoreFault] = lambda method, path: None
        self.faults: set[StoreFault] = set()
        self._port = port
        super().__init__()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        fault = self.fault(request.command, request.path)
        self._note(request, request.path)
        self.faults |= {fault} - {None}
        length = int(request.headers.get("Content-Length", 0))
        request.close_connection = fault in ("request cut", "lost", "cut")
        body = request.rfile.read(length // 2 if fault == "request cut" else length)
        if fault == "status":
            return _answer(request, self.status, b"")
        if fault == "error inside":
            return _answer(request, 200, b"<Error><Code>InternalError</Code></Error>")
        if fault == "request cut" and length:
            return
        time.sleep(0.2 if fault == "slow" else 0)
        store = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(store):
            body = bytes(length) if fault == "zeroed" else body
            store.request(request.command, request.path, body or None, dict(request.headers))
            answer = store.getresponse()
            data = answer.read()
        if fault == "lost":
            return
        request.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                request.send_header(name, value)
        is_head = request.command == "HEAD"
        stated = answer.getheader("Content-Length") if is_head else str(len(data))
        if answer.status not in (204, 304):
            request.send_header("Content-Length", stated or "0")
        request.end_headers()
        request.wfile.write(data[: len(data) // 2] if fault == "cut" else data)


def faults_by_chance(seed: int, share: float) -> Callable[[str, str], StoreFault]:
    """Return a fault for so large a share of the requests of each kind."""
    choices, lock = random.Random(seed), threading.Lock()
    kinds: tuple[StoreFault, ...] = ("status", "request cut", "cut", "lost", "slow")

    def fault(method: str, path: str) -> StoreFault:
        with lock:
            draw = int(choices.random() / share)
        return kinds[draw] if draw < len(kinds) else None

    return fault


def signature(asked: str | None) -> str:
    """Sign a Range header."""
    return hashlib.sha256(f"secret {asked}".encode()).hexdigest()


@functools.cache
def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _answer(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _start(
    handle: Callable[[BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits for the other side to hear of its head

        def setup(self) -> None:
            if tls is not None:
                self.request = tls.wrap_socket(self.request, server_side=True)
            super().setup()

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):
                handle(self)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            if not isinstance(sys.exception(), ssl.SSLError | ConnectionError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


@contextlib.contextmanager
def file_server(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[FileServer]:
    """Serve a folder until the end of the block."""
    with contextlib.closing(FileServer(folder, tls=tls)) as server:
        yield server
