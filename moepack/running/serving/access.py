"""Which pages and programs may use a server, by the names in their requests.

A browser sends requests for any open page, with the page's site (`Origin`) and the name that the
page used for the server (`Host`). llama.cpp's server answers before it looks at them: with its
`--cors-origins` another site's page cannot read an answer, but can have it computed; and a site
whose name leads to this machine (DNS rebinding) reads it as well.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

THIS_MACHINE = "localhost"
"""The word of `--cors-origins` for pages and programs on this machine."""

_ANY = "*"
_NAMES_IN_CONTAINERS = {"host.docker.internal", "host.containers.internal"}
"""Names of the machine around a container. No site has a name under `internal`."""
_SCHEMES_OF_PROGRAMS = {"app", "tauri", "vscode-webview"}
"""Pages in programs of this machine; a site's origin begins with http or https."""
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@?#\s]+)(?::[0-9]+)?")


class Access:
    """The pages and names that a server answers to.

    `origins` are those of `--cors-origins`: origins, `localhost` for pages of this machine's
    servers, or `*` for all. `hosts` are the server's own. If it `has_key`, names are not checked: a
    page that used another one has no key.
    """

    def __init__(self, origins: str, hosts: Iterable[str], has_key: bool) -> None:
        self._origins = {text for part in origins.split(",") if (text := part.strip())}
        own = socket.gethostname().lower()
        short = own.partition(".")[0]
        self._names = {own, short, f"{short}.local", *_NAMES_IN_CONTAINERS}
        self._names |= {host.lower() for host in hosts}
        self._names |= {name for origin in self._origins if (name := _hostname(origin)) is not None}
        self._has_key = has_key

    def refusal(self, fields: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Return why a request with these header fields is refused; None if it may pass.

        Names are in lower case, with at most one `host`. HTTP/1.0 may lack it: then it is the
        connection's address.
        """
        if _ANY in self._origins:
            return None
        values = [(name, value.decode("latin-1")) for name, value in fields]
        host = dict(values).get(b"host", THIS_MACHINE)
        origin = ", ".join(value for name, value in values if name == b"origin")
        if (match := _HOST.fullmatch(host)) is None:
            return f"{host} is no name of a server"
        name = match[1].lower()
        is_known = self._has_key or name in self._names
        if not (is_known or _is_local(name) or _address(name) is not None):
            option = self._option(f"http://{name}")
            return f"this server is not called {host}; use its address, or name it by {option}"
        if origin and not self._is_allowed(origin, host):
            return f"pages of {origin} may not use this server; {self._option(origin)} allows them"
        return None

    def _option(self, origin: str) -> str:
        return f"--cors-origins {','.join([*sorted(self._origins), origin])}"

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin in self._origins or origin.lower() in (f"http://{host}", f"https://{host}"):
            return True
        if THIS_MACHINE not in self._origins:
            return False
        name = _hostname(origin)
        is_program = origin.partition("://")[0] in _SCHEMES_OF_PROGRAMS and "," not in origin
        return is_program or (name is not None and _is_local(name))


def _hostname(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        return None


def _is_local(name: str) -> bool:
    address = _address(name)
    is_name = name == THIS_MACHINE or name.endswith(f".{THIS_MACHINE}")
    return is_name or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a name is, which no site can make lead elsewhere."""
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None
