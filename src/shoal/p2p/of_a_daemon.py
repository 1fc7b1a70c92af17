"""Parameters of a libp2p daemon: existing programs give them, and shoal has no daemon underneath."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

# Parameters without effect here, each with the value that needs no warning.
_OF_A_DAEMON: dict[str, Any] = {
    "auto_nat": True,
    "conn_manager": True,
    "dht_mode": "server",
    "force_reachability": None,
    "nat_port_map": True,
    "relay_hop_limit": 0,
    "tls": True,
    "use_auto_relay": False,
    "use_ipfs": False,
    "use_relay": True,
    "persistent_conn_max_msg_size": 4 * 2**20,
    "quic": None,
    "use_relay_hop": None,
    "use_relay_discovery": None,
    "trusted_relays": None,
}


def warn_without_effect(arguments: Mapping[str, Any]) -> None:
    """Warn of parameters that ask for something that will not happen.

    Raises:
        TypeError: there is no such parameter.
    """
    unknown = arguments.keys() - _OF_A_DAEMON.keys()
    if unknown:
        raise TypeError(f"P2P has no parameter {', '.join(sorted(unknown))}")
    asked = [name for name, value in arguments.items() if value != _OF_A_DAEMON[name]]
    if asked:
        logger.warning("%s: no effect here, there is no libp2p daemon underneath", ", ".join(asked))
