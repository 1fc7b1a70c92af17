"""The host names to which a web server for this machine alone answers.

A web site can point its own name to 127.0.0.1 after a visitor has loaded it (DNS rebinding). To the visitor's browser,
a server on the loopback then belongs to that site, whose scripts may read it. The browser still sends the name of the
site in the header ``Host``, so the server answers only to names that no web site can have.
"""

from __future__ import annotations

import ipaddress

from shoal.base.logs import quoted


def why_not_answered(bound: str, host: str | None, chosen: str = "") -> str | None:
    """Why a server must not answer a request, with what to do; ``None`` if it may.

    Args:
        bound: the IP address at which the server listens. If it is not on the loopback, the server is meant for other
            machines, which may use any name for it.
        host: the header ``Host`` of the request. Only old programs leave it out; browsers never do.
        chosen: the name or address at which the user told the server to listen.
    """
    if host is None or not _is_loopback(bound):
        return None
    name = _name_of(host)
    is_chosen = bool(name) and name == chosen.lower().removesuffix(".")
    if is_chosen or _is_loopback(name) or name == "localhost" or name.endswith(".localhost"):
        return None
    return (
        f"This server is for programs of this machine only, and does not answer to {quoted(host)}. "
        f"Ask for http://localhost instead. To show it to others, let it listen at another address than {bound}, such "
        "as 0.0.0.0."
    )


def _name_of(host: str) -> str:
    """The name in a header ``Host``, without the port, and without the dot that may end a name."""
    text = host.strip().lower()
    if text.startswith("["):
        name, _, port = text[1:].partition("]")
        return name if not port or port.startswith(":") else text
    return text.partition(":")[0].removesuffix(".") if text.count(":") == 1 else text.removesuffix(".")


def _is_loopback(text: str) -> bool:
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return ip.is_loopback if mapped is None else mapped.is_loopback
