"""What lies between a program and a store: requests and answers that get lost, late or refused."""

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

StoreFault = (
    Literal["refused", "error", "request cut", "answer cut", "answer lost", "slow", "zeroed"] | None
)


class FaultyStore:
    """Passes requests on to a store; `fault` says what goes wrong with each, by method and path.

    `status` is the answer to one that is refused, an error in the text of 200 OK to another. One
    whose request is cut never reaches the store; one whose answer is cut or lost was carried out;
    of one that is zeroed it stores zeros.
    """

    def __init__(self, port: int) -> None:
        self.fault: Callable[[str, str], StoreFault] = lambda method, path: None
        self.status = 503
        self.requests: list[tuple[str, str, StoreFault]] = []
        self._port = port
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def do_GET(self) -> None:
                proxy._handle(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def faults(self) -> set[StoreFault]:
        """Return the faults that happened."""
        return {fault for _, _, fault in self.requests} - {None}

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        fault = self.fault(request.command, request.path)
        self.requests.append((request.command, request.path, fault))
        length = int(request.headers.get("Content-Length", 0))
        if fault == "request cut" and length:
            request.rfile.read(length // 2)
            return self._end(request)
        body = request.rfile.read(length)
        if fault in ("refused", "error"):
            text = b"" if fault == "refused" else b"<Error><Code>InternalError</Code></Error>"
            request.send_response(200 if text else self.status)
            request.send_header("Content-Length", str(len(text)))
            request.end_headers()
            request.wfile.write(text)
            return
        if fault == "zeroed":
            body = bytes(length)
        if fault == "slow":
            time.sleep(0.2)
        store = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(store):
            store.request(request.command, request.path, body or None, dict(request.headers))
            answer = store.getresponse()
            data = answer.read()
        if fault == "answer lost":
            return self._end(request)
        request.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                request.send_header(name, value)
        is_head = request.command == "HEAD"
        stated = answer.getheader("Content-Length") if is_head else str(len(data))
        if answer.status not in (204, 304):
            request.send_header("Content-Length", stated or "0")
        request.end_headers()
        if fault == "answer cut" and data:
            request.wfile.write(data[: len(data) // 2])
            return self._end(request)
        request.wfile.write(data)

    def _end(self, request: BaseHTTPRequestHandler) -> None:
        request.wfile.flush()
        request.close_connection = True


def faults_by_chance(seed: int, share: float) -> Callable[[str, str], StoreFault]:
    """Return a fault for so large a share of the requests of each kind."""
    choices, lock = random.Random(seed), threading.Lock()

    def fault(method: str, path: str) -> StoreFault:
        with lock:
            draw = choices.random() / share
        kinds: tuple[StoreFault, ...] = ("refused", "request cut", "answer cut", "answer lost")
        return kinds[int(draw)] if draw < len(kinds) else "slow" if draw < 5 else None

    return fault
