"""Which hosts and origins a server answers. Standard library only."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class OwnHosts:
    """Names under which a server may be asked. A web site that lets its own name point to this machine (DNS rebinding), so
    that browsers take the server for a part of the site, is recognised by the host that they send: the site's name."""

    def __init__(
        self, names: Iterable[str] = LOOPBACK, *, port: int | None = None, any_address: bool = False, hint: str = ""
    ) -> None:
        """port: the only port that a host may name; None allows any, since a proxy or a container may change it.
        any_address: also answer every IP address, which no web site can have as its name. hint: added to a refusal."""
        self.names, self.port, self.any_address, self.hint = {x.lower() for x in names}, port, any_address, hint

    def find_fault(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers is refused, in a sentence; None if it is not."""
        hosts, origins = ([v.decode("latin-1") for n, v in headers if n == name] for name in (b"host", b"origin"))
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return f"this server answers {self} only, got host {', '.join(hosts) or 'none'}{self.hint}"
        own = {f"http://{hosts[0]}"} | (set() if self.port else {f"https://{hosts[0]}"})
        if any(origin not in own for origin in origins):
            return f"this server answers pages of {hosts[0]} only, got origin {', '.join(origins)}"
        return None

    def _is_own(self, host: str) -> bool:
        name, port = _split(host)
        if (self.port is not None and port != str(self.port)) or not (port.isdigit() or port == ""):
            return False
        return name.lower() in self.names or (self.any_address and _is_address(name))

    def __str__(self) -> str:
        end = "" if self.port is None else f":{self.port}"
        named = [(f"[{x}]" if ":" in x else x) + end for x in sorted(self.names)]
        return " and ".join(["IP addresses"] * self.any_address + named)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _split(host: str) -> tuple[str, str]:
    """Name and port of a Host header; an IPv6 address stands in brackets there."""
    if host.startswith("["):
        name, closed, port = host[1:].partition("]")
        return (name, port.removeprefix(":")) if closed and port[:1] in ("", ":") else (host, "")
    name, _, port = host.partition(":")
    return name, port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
