"""Which requests may pass: by the name that they use, and the page that they come from."""

import socket

import pytest

from moepack.running.programs.access import Access, MalformedError, parse_head

OWN = Access.from_options("localhost", ["127.0.0.1"], has_key=False)
KEYED = Access.from_options("localhost", ["0.0.0.0"], has_key=True)
LISTED = Access.from_options("https://chat.example, localhost", ["192.0.2.7"], has_key=False)
OPEN = Access.from_options("*", ["127.0.0.1"], has_key=False)
STRICT = Access.from_options("http://127.0.0.1:8080", ["127.0.0.1"], has_key=False)


def allows(access: Access, host: str | None, origin: str | None = None) -> bool:
    """Return whether a request with these header fields may pass."""
    lines = ["POST /completion HTTP/1.1", "Accept: */*"]
    lines += [] if host is None else [f"Host: {host}"]
    lines += [] if origin is None else [f"oRIGIN:{origin} "]
    return access.refusal(parse_head("\r\n".join([*lines, "", ""]).encode())) is None


@pytest.mark.parametrize(
    ("access", "host", "origin"),
    [
        (OWN, "127.0.0.1:8080", None),
        (OWN, "[::1]:8080", None),
        (OWN, "LOCALHOST", "http://LocalHost"),
        (OWN, "192.168.1.5:8080", "http://192.168.1.5:8080"),
        (OWN, f"{socket.gethostname()}:8080", None),
        (OWN, "127.0.0.1:8080", "http://localhost:3000"),
        (OWN, "127.0.0.1:8080", "https://app.localhost"),
        (KEYED, "models.example", "https://models.example"),
        (LISTED, "chat.example", "https://chat.example"),
        (OPEN, "evil.example", "null"),
        (STRICT, "127.0.0.1:8080", "http://127.0.0.1:8080"),
    ],
)
def test_what_the_user_does_may_pass(access: Access, host: str, origin: str | None) -> None:
    assert allows(access, host, origin)


@pytest.mark.parametrize(
    ("access", "host", "origin"),
    [
        (OWN, "127.0.0.1:8080", "https://evil.example"),
        (OWN, "127.0.0.1:8080", "null"),
        (OWN, "127.0.0.1:8080", "http://localhost.evil.example"),
        (OWN, "127.0.0.1:8080", "http://localhost@evil.example"),
        (OWN, "127.0.0.1:8080", "chrome-extension://localhost"),
        (OWN, "127.0.0.1:8080", "http://[localhost"),
        (OWN, "evil.example", None),
        (OWN, "127.0.0.1.evil.example", None),
        (OWN, "localhost@evil.example", None),
        (OWN, "localhost, evil.example", None),
        (OWN, None, None),
        (KEYED, "127.0.0.1", "https://evil.example"),
        (LISTED, "other.example", None),
        (STRICT, "127.0.0.1:8080", "http://localhost:3000"),
    ],
)
def test_what_other_sites_do_may_not_pass(
    access: Access, host: str | None, origin: str | None
) -> None:
    assert not allows(access, host, origin)


@pytest.mark.parametrize(
    "fields",
    [
        b"Host: localhost\r\nHost: evil.example",
        b"Host: localhost\r\nOrigin: http://localhost\r\nOrigin: http://evil.example",
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: bytes) -> None:
    assert OWN.refusal(parse_head(b"GET / HTTP/1.1\r\n" + fields + b"\r\n\r\n")) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n Origin: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\nOrigin: http://localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\rOrigin: http://localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: local\0host\r\n\r\n",
        b"GET / HTTP/1.1\r\n: localhost\r\n\r\n",
    ],
)
def test_a_head_that_others_might_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_head(data)
