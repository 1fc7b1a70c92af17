"""Parameters that existing programs give, because other libraries hand them to a libp2p daemon.

Those about routers and relays have the same effect here. The others have none, for there is no daemon underneath.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.net.pasted import Target, read_targets

logger = logging.getLogger(__name__)

# Parameters without effect here, each with the value that needs no warning.
_WITHOUT_EFFECT: dict[str, Any] = {
    "conn_manager": True,
    "dht_mode": "server",
    "tls": True,
    "use_ipfs": False,
    "persistent_conn_max_msg_size": 4 * 2**20,
    "quic": None,
    "use_relay_hop": None,
    "use_relay_discovery": None,
}
_DHT_MODES = ("server", "client", "auto")
_REACHABILITIES = (None, "public", "private")


@dataclass(frozen=True)
class Libp2pOptions:
    """How a peer makes sure that others can call it."""

    auto_nat: bool = True
    """Ask others from time to time whether they can dial this peer."""
    force_reachability: str | None = None
    """``"public"`` or ``"private"``, if it is known and need not be found out."""
    nat_port_map: bool = True
    """Ask the router for an open port."""
    use_relay: bool = True
    """Dial others through relays where there is no other way."""
    use_auto_relay: bool = True
    """Be called through relays while nobody can dial this peer."""
    trusted_relays: tuple[Target, ...] = ()
    """The relays to be called through, if they have room."""
    relay_hop_limit: int | None = None
    """0: never be a relay for others; by default every public peer is one."""

    @property
    def forced(self) -> bool | None:
        """Whether this peer is public, if the user has said so."""
        return None if self.force_reachability is None else self.force_reachability == "public"

    @classmethod
    def names(cls) -> set[str]:
        """Of all parameters, also those without an effect."""
        return {field.name for field in fields(cls)} | _WITHOUT_EFFECT.keys()

    @classmethod
    def chosen(cls, arguments: Mapping[str, Any]) -> Libp2pOptions:
        """Take what has an effect, and warn of parameters that ask for something that will not happen.

        Raises:
            TypeError: there is no such parameter.
            ValueError: it cannot have this value.
        """
        names = {field.name for field in fields(cls)}
        unknown = arguments.keys() - _WITHOUT_EFFECT.keys() - names
        if unknown:
            raise TypeError(f"P2P has no parameter {', '.join(sorted(unknown))}")
        chosen = {name: value for name, value in arguments.items() if name in names}
        if chosen.get("force_reachability") not in _REACHABILITIES:
            raise ValueError(
                f"force_reachability is {chosen['force_reachability']!r}: give 'public', 'private' or None"
            )
        if arguments.get("dht_mode", "server") not in _DHT_MODES:
            raise ValueError(f"dht_mode is {arguments['dht_mode']!r}: give 'server', 'client' or 'auto'")
        chosen["trusted_relays"] = tuple(read_targets(chosen.get("trusted_relays") or (), "trusted_relays"))
        others = {name: value for name, value in arguments.items() if name not in names}
        asked = [name for name, value in others.items() if value != _WITHOUT_EFFECT[name]]
        if asked:
            logger.warning("%s: no effect here, there is no libp2p daemon underneath", ", ".join(asked))
        return cls(**chosen)
