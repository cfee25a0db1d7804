"""Access to a server on this machine: for the page that it serves, and no other site's.

A browser sends requests for any open page, with the page's site (`Origin`) and the name that the
page used for the server (`Host`). llama.cpp's server answers before it looks at them: with its
`--cors-origins` another site's page cannot read an answer, but can have it computed; and a site
whose name leads to this machine (DNS rebinding) reads it as well.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

THIS_MACHINE = "localhost"
"""The word of `--cors-origins` for pages and programs on this machine."""

_ANY = "*"
_NAMES_IN_CONTAINERS = {"host.docker.internal", "host.containers.internal"}
"""Names of the machine around a container. No site has a name under `internal`."""
_SCHEMES_OF_PROGRAMS = {"app", "tauri", "vscode-webview"}
"""Pages in programs of this machine; a site's origin begins with http or https."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#\s]+)(?::[0-9]+)?")


class Access(NamedTuple):
    """The pages and names that a server answers to.

    `origins` are as in `--cors-origins`: origins, `localhost` for pages of this machine's servers,
    or `*` for all. `names` are this machine's. If the server `has_key`, names are not checked: a
    page that used another one has no key.
    """

    origins: frozenset[str]
    names: frozenset[str]
    has_key: bool

    @classmethod
    def from_options(cls, origins: str, hosts: Iterable[str], has_key: bool) -> Access:
        """Return the rules for a server by its `--cors-origins`, `--host` and `--api-key`."""
        listed = frozenset(text for part in origins.split(",") if (text := part.strip()))
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        names = {own, short, f"{short}.local", *_NAMES_IN_CONTAINERS}
        names |= {host.lower() for host in hosts}
        names |= {name for origin in listed if (name := _hostname(origin)) is not None}
        return cls(listed, frozenset(names), has_key)

    def refusal(self, fields: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return why a request with these header fields is refused; None if it may pass.

        Names are in lower case, with at most one `host`. HTTP/1.0 may lack it: then it is the
        connection's address.
        """
        if _ANY in self.origins:
            return None
        values = [(name, value.decode("latin-1")) for name, value in fields]
        host = dict(values).get(b"host", THIS_MACHINE)
        origin = ", ".join(value for name, value in values if name == b"origin")
        if (match := _HOST.fullmatch(host)) is None:
            return f"{host} is no name of a server"
        name = match[1].lower()
        if not (self.has_key or _is_local(name) or _is_address(name) or name in self.names):
            option = self._option(f"http://{name}")
            return f"this server is not called {host}; use its address, or name it by {option}"
        if origin and not self._is_allowed(origin, host):
            return f"pages of {origin} may not use this server; {self._option(origin)} allows them"
        return None

    def _option(self, origin: str) -> str:
        return f"--cors-origins {','.join([*sorted(self.origins), origin])}"

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin in self.origins or origin.lower() in (f"http://{host}", f"https://{host}"):
            return True
        if THIS_MACHINE not in self.origins:
            return False
        name = _hostname(origin)
        is_program = origin.partition("://")[0] in _SCHEMES_OF_PROGRAMS and "," not in origin
        return is_program or (name is not None and _is_local(name))


def _hostname(origin: str) -> str | None:
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
