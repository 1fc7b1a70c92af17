"""Joining a swarm: at least one known peer must answer, be able to call back, and have the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.clock import timeout as time_limit
from shoal.dht.protocol import NO_ANSWER, SECONDS_BETWEEN_ATTEMPTS, DHTProtocol
from shoal.errors import BootstrapError, ValidationError
from shoal.p2p import Multiaddr, PeerID

logger = logging.getLogger(__name__)

Targets = Sequence[tuple[Multiaddr, PeerID]]


Outcomes = asyncio.Queue[tuple[PeerID, "Exception | None"]]

PING_ATTEMPTS = 3
"""A connection may break by chance; only then is a peer asked again."""


async def ping_initial_peers(
    protocol: DHTProtocol, targets: Targets, *, timeout: float, must_succeed: bool, strict: bool
) -> None:
    """Return as soon as one initial peer has answered well; the others go on answering in the background.

    Args:
        protocol: the node that joins; learns who answers.
        targets: where the initial peers are and who they are.
        timeout: seconds to wait for the first answer.
        must_succeed: let the peers check this node, and fail if none answers.
        strict: fail if all peers that answer find that this node cannot be reached or has another time.

    Raises:
        ValidationError: with ``strict``.
        BootstrapError: nobody answered, with ``must_succeed``.
    """
    for address, peer in targets:
        protocol.p2p.add_addresses(peer, [address])
    peers = list(dict.fromkeys(peer for _, peer in targets if peer != protocol.p2p.peer_id))
    outcomes: Outcomes = asyncio.Queue()
    for peer in peers:
        protocol.spawn(_ping(protocol, peer, must_succeed, outcomes))
    errors: dict[PeerID, Exception] = {}
    try:
        async with time_limit(timeout):
            while len(errors) < len(peers):
                peer, error = await outcomes.get()
                if error is None:
                    return
                errors[peer] = error
    except (asyncio.TimeoutError, TimeoutError):
        pass
    objections = [error for error in errors.values() if isinstance(error, ValidationError)]
    if objections:
        _object(objections[0], strict)
    elif peers:
        _report_silence(targets, errors, timeout, must_succeed)


async def _ping(protocol: DHTProtocol, peer: PeerID, validate: bool, outcomes: Outcomes) -> None:
    error: Exception | None = None
    for attempt in range(PING_ATTEMPTS):
        try:
            await protocol.ping(peer, validate=validate)
        except (ValidationError, asyncio.TimeoutError, TimeoutError) as e:
            error = e
            break
        except NO_ANSWER as e:
            error = e
            await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS * (attempt + 1))
        else:
            error = None
            break
    outcomes.put_nowait((peer, error))


def _object(objection: ValidationError, strict: bool) -> None:
    if strict:
        raise objection
    logger.warning("%s", objection)


def _report_silence(targets: Targets, errors: dict[PeerID, Exception], timeout: float, must_succeed: bool) -> None:
    reasons = {peer: str(error) or "no answer in time" for peer, error in errors.items()}
    verdicts = {
        f"{address}/p2p/{peer}": reasons.get(peer, f"no answer within {timeout:g} s") for address, peer in targets
    }
    error = BootstrapError(verdicts)
    if must_succeed:
        raise error
    logger.warning("starting alone: %s", error)
