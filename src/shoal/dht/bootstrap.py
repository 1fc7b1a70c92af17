"""Joining a swarm: at least one known peer must answer, be able to call back, and have the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.clock import timeout as time_limit
from shoal.dht.protocol import NO_ANSWER, DHTProtocol
from shoal.errors import BootstrapError, ValidationError
from shoal.p2p import Multiaddr, PeerID

logger = logging.getLogger(__name__)

Targets = Sequence[tuple[Multiaddr, PeerID]]


async def ping_initial_peers(
    protocol: DHTProtocol, targets: Targets, *, timeout: float, must_succeed: bool, strict: bool
) -> None:
    """Return as soon as one initial peer has answered; the others go on answering in the background.

    Args:
        protocol: the node that joins; learns who answers.
        targets: where the initial peers are and who they are.
        timeout: seconds to wait for the first answer.
        must_succeed: let the peers check this node, and fail if none answers.
        strict: fail if a peer finds that this node cannot be reached or has another time.

    Raises:
        ValidationError: with ``strict``.
        BootstrapError: nobody answered, with ``must_succeed``.
    """
    for address, peer in targets:
        protocol.p2p.add_addresses(peer, [address])
    peers = list(dict.fromkeys(peer for _, peer in targets if peer != protocol.p2p.peer_id))
    outcomes: asyncio.Queue[tuple[PeerID, Exception | None]] = asyncio.Queue()
    for peer in peers:
        protocol.spawn(_ping(protocol, peer, must_succeed, outcomes))
    reasons: dict[PeerID, str] = {}
    try:
        async with time_limit(timeout):
            while len(reasons) < len(peers):
                peer, error = await outcomes.get()
                if _has_answered(error, strict):
                    return
                reasons[peer] = str(error) or "no answer in time"
    except (asyncio.TimeoutError, TimeoutError):
        pass
    if peers:
        _report_silence(targets, reasons, timeout, must_succeed)


async def _ping(
    protocol: DHTProtocol, peer: PeerID, validate: bool, outcomes: asyncio.Queue[tuple[PeerID, Exception | None]]
) -> None:
    error: Exception | None = None
    try:
        await protocol.ping(peer, validate=validate)
    except NO_ANSWER as e:
        error = e
    outcomes.put_nowait((peer, error))


def _has_answered(error: Exception | None, strict: bool) -> bool:
    if isinstance(error, ValidationError):
        if strict:
            raise error
        logger.warning("%s", error)
        return True
    return error is None


def _report_silence(targets: Targets, reasons: dict[PeerID, str], timeout: float, must_succeed: bool) -> None:
    verdicts = {
        f"{address}/p2p/{peer}": reasons.get(peer, f"no answer within {timeout:g} s") for address, peer in targets
    }
    error = BootstrapError(verdicts)
    if must_succeed:
        raise error
    logger.warning("starting alone: %s", error)
