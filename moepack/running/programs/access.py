"""Access to a server on this machine: for the page that it serves, and no other site's.

A browser sends requests for any page that is open. It tells whose page (`Origin`) and which name
the page used for the server (`Host`). llama.cpp's server looks at neither before it answers: with
its `--cors-origins` another site's page cannot read an answer, but can have it computed; and a site
whose name leads to this machine (DNS rebinding) reads it as well.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

ANY = "*"
THIS_MACHINE = "localhost"
"""The word of `--cors-origins` for pages of servers on this machine."""

_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(.*?)[ \t]*")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#\s]+)(?::[0-9]+)?")


class RequestHead(NamedTuple):
    """The head of an HTTP request: its first line, and its fields with names in lower case."""

    line: bytes
    fields: Sequence[tuple[bytes, bytes]]

    def values(self, name: bytes) -> list[str]:
        """Return the values of all fields with a name."""
        return [value.decode("latin-1") for key, value in self.fields if key == name]


class MalformedError(Exception):
    """The head of a request could be read in two ways."""


def parse_head(data: bytes) -> RequestHead:
    """Read the head of a request, up to its empty line. Raises MalformedError."""
    line, *rest = data.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(line.split(b" ")) != 3 or any(byte < 32 for byte in line):
        raise MalformedError("the request line is malformed")
    fields = []
    for text in rest:
        match = _FIELD.fullmatch(text)
        if match is None or any(byte in text for byte in (b"\r", b"\n", b"\0")):
            raise MalformedError("a header field is malformed")
        fields.append((match[1].lower(), match[2]))
    return RequestHead(line, fields)


class Access(NamedTuple):
    """The pages and names that a server answers to.

    `origins` are as in `--cors-origins`: origins, `localhost` for pages of this machine's servers,
    or `*` for all. `names` are those of this machine. If it `has_key`, no name needs to be
    checked: a page that used another has no key.
    """

    origins: frozenset[str]
    names: frozenset[str]
    has_key: bool

    @classmethod
    def from_options(cls, origins: str, hosts: Iterable[str], has_key: bool) -> Access:
        """Return the rules for a server with such `--cors-origins`, `--host` and `--api-key`."""
        listed = frozenset(text for part in origins.split(",") if (text := part.strip()))
        own = socket.gethostname().lower()
        names = {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
        names |= {host.lower() for host in hosts}
        names |= {name for origin in listed if (name := _hostname(origin)) is not None}
        return cls(listed, frozenset(names), has_key)

    def refusal(self, head: RequestHead) -> str | None:
        """Return why a request is refused; None if it may pass."""
        if ANY in self.origins:
            return None
        hosts, origins = head.values(b"host"), head.values(b"origin")
        if len(hosts) != 1 or (match := _HOST.fullmatch(hosts[0])) is None:
            return "the request names no host, or several"
        if len(origins) > 1:
            return "the request names several origins"
        name = match[1].lower()
        is_ours = _is_local(name) or _is_address(name) or name in self.names
        if not self.has_key and not is_ours:
            return (
                f"this server is not called {match[1]}; use its address, or name it by "
                f"--cors-origins http://{match[1]}"
            )
        if origins and not self._is_allowed(origins[0], hosts[0]):
            return f"pages of {origins[0]} may not use this server; --cors-origins allows them"
        return None

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin in self.origins or origin.lower() in (f"http://{host}", f"https://{host}"):
            return True
        name = _hostname(origin)
        return THIS_MACHINE in self.origins and name is not None and _is_local(name)


def _hostname(origin: str) -> str | None:
    """Return the name or address in an origin; None without one (`null`)."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname
    except ValueError:
        return None
    return name if parts.scheme in ("http", "https") else None


def _is_local(name: str) -> bool:
    if name == THIS_MACHINE or name.endswith(f".{THIS_MACHINE}"):
        return True
    return _is_address(name) and ipaddress.ip_address(name.strip("[]")).is_loopback


def _is_address(name: str) -> bool:
    """Return whether a name is an address, which no site can make lead elsewhere."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
