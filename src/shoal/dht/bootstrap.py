"""Joining a swarm: at least one known peer must answer, be able to call back, and agree about the time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.dht.protocol import NO_ANSWER, SECONDS_BETWEEN_ATTEMPTS, DHTProtocol
from shoal.errors import BootstrapError, IdentityMismatchError, ValidationError
from shoal.p2p import Multiaddr, PeerID

logger = logging.getLogger(__name__)

Targets = Sequence[tuple[Multiaddr, PeerID]]


Outcomes = asyncio.Queue[tuple[PeerID, "Exception | None"]]

PING_ATTEMPTS = 3
"""A connection may break by chance; only then is a peer asked again."""
SECOND_OPINION_SECONDS = 1.0
"""How long other initial peers may take to say what time it is, if the first one says that this machine is wrong."""


async def ping_initial_peers(
    protocol: DHTProtocol, targets: Targets, *, timeout: float, must_succeed: bool, strict: bool
) -> None:
    """Return as soon as one initial peer has answered well; the others go on answering in the background.

    Args:
        protocol: the node that joins; learns who answers.
        targets: where the initial peers are and who they are.
        timeout: seconds to wait for the first answer.
        must_succeed: let the peers check this node, and fail if none answers.
        strict: fail if all peers that answer find that this node cannot be reached, or do not agree about the time.

    Raises:
        ValidationError: with ``strict``.
        BootstrapError: nobody answered, with ``must_succeed``.
    """
    clock = protocol.p2p.clock
    for address, peer in targets:
        protocol.p2p.add_addresses(peer, [address])
        clock.join_through(peer)
    peers = list(dict.fromkeys(peer for _, peer in targets if peer != protocol.p2p.peer_id))
    queue: Outcomes = asyncio.Queue()
    for peer in peers:
        protocol.spawn(_ping(protocol, peer, must_succeed, queue))
    outcomes: dict[PeerID, Exception | None] = {}
    began = asyncio.get_running_loop().time()
    await _collect(queue, outcomes, len(peers), timeout, until_success=True)
    if clock.offset:
        left = began + timeout - asyncio.get_running_loop().time()
        await _collect(queue, outcomes, len(peers), min(left, SECOND_OPINION_SECONDS), until_success=False)
    if clock.is_disputed and any(peer in clock.sources for peer in outcomes):
        _object(
            "the peers through which this node joins do not agree about the time", _clock_verdicts(protocol), strict
        )
    elif None in outcomes.values() or not peers:
        return
    elif any(isinstance(error, ValidationError) for error in outcomes.values()):
        verdicts = _verdicts(targets, outcomes, timeout)
        _object("no peer that answers lets this node join", verdicts, strict)
    else:
        error = BootstrapError(_verdicts(targets, outcomes, timeout))
        if must_succeed:
            raise error
        logger.warning("starting alone: %s", error)


async def _collect(
    queue: Outcomes, outcomes: dict[PeerID, Exception | None], count: int, timeout: float, *, until_success: bool
) -> None:
    """Wait for the outcomes of pings, all of them or until the first good one."""
    try:
        async with asyncio.timeout(max(0.0, timeout)):
            while len(outcomes) < count:
                peer, error = await queue.get()
                outcomes[peer] = error
                if until_success and error is None:
                    return
    except TimeoutError:
        return


async def _ping(protocol: DHTProtocol, peer: PeerID, validate: bool, outcomes: Outcomes) -> None:
    error: Exception | None = None
    for attempt in range(PING_ATTEMPTS):
        try:
            await protocol.ping(peer, validate=validate)
        except (ValidationError, TimeoutError) as e:
            error = e
            break
        except NO_ANSWER as e:
            error = e
            await asyncio.sleep(SECONDS_BETWEEN_ATTEMPTS * (attempt + 1))
        else:
            error = None
            break
    if isinstance(error, IdentityMismatchError):  # others may have let this node in, so that nobody else would say it
        logger.warning("an initial peer is another one than expected: %s", error)
    outcomes.put_nowait((peer, error))


def _object(text: str, verdicts: dict[str, str], strict: bool) -> None:
    objection = ValidationError(f"{text}:", verdicts)
    if strict:
        raise objection
    logger.warning("%s", objection)


def _verdicts(targets: Targets, outcomes: dict[PeerID, Exception | None], timeout: float) -> dict[str, str]:
    """What came of each address."""
    reasons = {peer: str(error) or "no answer in time" for peer, error in outcomes.items()}
    return {f"{address}/p2p/{peer}": reasons.get(peer, f"no answer within {timeout:g} s") for address, peer in targets}


def _clock_verdicts(protocol: DHTProtocol) -> dict[str, str]:
    """What time it is, as each peer tells it that has been asked."""
    return {
        f"peer {source}": f"clock off by {seconds:+.1f} s, compared with the clock of this machine; no majority "
        "tells who is right, so turn on NTP wherever the time is wrong"
        for source, seconds in protocol.p2p.clock.sources.items()
    }
