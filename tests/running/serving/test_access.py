"""Requests of pages and programs, by the names in them, and whether they may pass."""

import socket

import pytest

from moepack.running.serving.access import Access

OWN = Access("localhost", ["127.0.0.1"], has_key=False)
KEYED = Access("localhost", ["0.0.0.0"], has_key=True)
LISTED = Access("https://chat.example, localhost", ["192.0.2.7"], has_key=False)
OPEN = Access("*", ["127.0.0.1"], has_key=False)
STRICT = Access("http://127.0.0.1:8080", ["127.0.0.1"], has_key=False)


def allows(access: Access, host: str | None, *origins: str) -> bool:
    """Return whether a request with these header fields may pass."""
    fields = [(b"accept", b"*/*")]
    fields += [] if host is None else [(b"host", host.encode())]
    fields += [(b"origin", origin.encode()) for origin in origins]
    return access.refusal(fields) is None


@pytest.mark.parametrize(
    ("access", "host", "origin"),
    [
        (OWN, "127.0.0.1:8080", None),
        (OWN, "[::1]:8080", None),
        (OWN, None, None),  # HTTP/1.0
        (OWN, "LOCALHOST", "http://LocalHost"),
        (OWN, "192.168.1.5:8080", "http://192.168.1.5:8080"),
        (OWN, f"{socket.gethostname()}:8080", None),
        (OWN, f"{socket.gethostname().partition('.')[0]}.local:8080", None),
        (OWN, "host.docker.internal:8080", "http://host.docker.internal:8080"),
        (OWN, "host.containers.internal:8080", None),
        (OWN, "127.0.0.1:8080", "app://obsidian.md"),
        (OWN, "127.0.0.1:8080", "tauri://localhost"),
        (OWN, "127.0.0.1:8080", "vscode-webview://0123abcd"),
        (OWN, "127.0.0.1:8080", "http://localhost:3000"),
        (OWN, "127.0.0.1:8080", "https://app.localhost"),
        (KEYED, "models.example", "https://models.example"),
        (LISTED, "chat.example", "https://chat.example"),
        (OPEN, "evil.example", "null"),
        (STRICT, "127.0.0.1:8080", "http://127.0.0.1:8080"),
    ],
)
def test_what_the_user_does_may_pass(access: Access, host: str | None, origin: str | None) -> None:
    assert allows(access, host, *([] if origin is None else [origin]))


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
        (OWN, "docker.internal", None),
        (OWN, "host.docker.internal.evil.example", None),
        (OWN, "127.0.0.1:8080", "http://app"),
        (OWN, None, "https://evil.example"),
        (KEYED, "127.0.0.1", "https://evil.example"),
        (LISTED, "other.example", None),
        (STRICT, "127.0.0.1:8080", "http://localhost:3000"),
        (STRICT, "127.0.0.1:8080", "app://obsidian.md"),
    ],
)
def test_what_other_sites_do_may_not_pass(
    access: Access, host: str | None, origin: str | None
) -> None:
    assert not allows(access, host, *([] if origin is None else [origin]))


@pytest.mark.parametrize("first", ["http://localhost", "app://obsidian.md"])
def test_a_second_origin_is_not_overlooked(first: str) -> None:
    assert not allows(OWN, "localhost", first, "http://evil.example")
    assert not allows(OWN, "localhost", "http://evil.example", first)


@pytest.mark.parametrize(
    ("host", "origin"), [("other.example:80", None), ("127.0.0.1", "https://other.example")]
)
def test_the_option_in_a_refusal_lets_the_request_pass_and_the_others_still(
    host: str, origin: str | None
) -> None:
    origins = [] if origin is None else [origin]
    fields = [(b"host", host.encode()), *((b"origin", text.encode()) for text in origins)]
    problem = OWN.refusal(fields)
    assert problem is not None
    words = problem.replace(";", "").split()
    listed = words[words.index("--cors-origins") + 1]
    access = Access(listed, ["127.0.0.1"], has_key=False)
    assert allows(access, host, *origins)
    assert allows(access, "127.0.0.1", "http://localhost:3000")
