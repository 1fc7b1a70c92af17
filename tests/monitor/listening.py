"""Where this machine can listen."""

from __future__ import annotations

import socket


def can_listen(host: str) -> bool:
    """macOS has one IPv4 loopback address, and some machines have no IPv6."""
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except OSError:
        return False
