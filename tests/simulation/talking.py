"""Peers that tell each other of their progress, as trackers over a real table do, and the bytes that it takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.dht import DHTNode
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.validation import CompositeValidator
from shoal.optim.performance_ema import PerformanceEMA
from shoal.optim.progress import RefreshPolicy
from shoal.optim.progress_board import ProgressBoard
from shoal.optim.progress_exchange import ProgressExchange
from shoal.optim.progress_schema import endorse
from shoal.testing import Host, Link, Network, run, start_dht_nodes

RUN = "benchmark"
LINK = Link(delay=(0.01, 0.05), jitter=0.005)
REPORTS_PER_SECOND = 5
BATCH = 16
SETTLING_SECONDS = 60.0
"""Until everybody knows everybody; what is said before does not count."""
PATIENCE = 1.0
ROUND_SECONDS = 0.2
NEVER = 10**12

BYTES_OF_HANDSHAKE = 1000
"""Of a TLS 1.3 handshake with an Ed25519 certificate and the proof of the dialler's identity: what each side sends."""


@dataclass
class Talk:
    """What a swarm has said. Rates are in bytes per second, of the mean peer."""

    peers: int
    rate: float
    """While no epoch ended."""
    busiest: float
    """Of the peer that sent most."""
    by_handler: dict[str, float]
    """The rate by what is called; "handshakes" is an estimate."""
    bytes_per_member: float = 0.0
    """Of the mean peer at the end of an epoch, for each member of its group."""
    samples: list[int] = field(default_factory=list)
    """Of all peers in each epoch."""


class Talker:
    """The tracker of one peer, without its facade, and a loop that trains."""

    def __init__(self, host: Host, node: DHTNode, target: int, seconds: float) -> None:
        self.host, self.node, self.seconds = host, node, seconds
        self.samples = 0
        signatures = SignatureValidator(PrivateKey())
        node.protocol.record_validator.extend([signatures])  # type: ignore[union-attr]
        loop = asyncio.get_running_loop()
        self.ema = PerformanceEMA(alpha=0.1, clock=loop.time)
        self.board = ProgressBoard(
            node.peer_id.to_bytes(), node.client_mode, target, RefreshPolicy(), self.ema, host.dht_time()
        )
        tag = signatures.local_public_key
        self.exchange = ProgressExchange(
            node,
            node.p2p,
            RUN,
            self.board,
            owner_tag=tag,
            endorsement=endorse(node.p2p.identity, tag),
            min_period=0.5,
            metadata_expiration=60.0,
        )

    async def work(self) -> None:
        """Make one batch after the other, until the epoch is over."""
        rng = self.host.rng
        while True:
            await asyncio.sleep(self.seconds * rng.uniform(0.9, 1.1))
            self.samples += BATCH
            self.board.report(self.board.own.epoch, self.samples, self.host.dht_time())
            self.exchange.report_due.set()
            if self.board.should_stop(self.host.dht_time(), PATIENCE):
                return

    def declare_over(self) -> None:
        self.ema.pause().__enter__()
        self.board.begin_update(self.host.dht_time(), PATIENCE)
        self.exchange.call_due.set()

    def next_epoch(self, members: set[bytes]) -> None:
        self.ema.reset_timer()
        self.board.finish_update(self.board.own.epoch + 1, members, self.host.dht_time())
        self.exchange.call_due.set()
        self.samples = 0

    @property
    def sent(self) -> Counter[str]:
        """Bytes so far, by handler."""
        metrics = self.node.p2p.metrics
        sent = Counter({name.rpartition(".")[2]: size for name, size in metrics.bytes_sent_by_handler.items()})
        connections = metrics.connections_dialled + metrics.connections_accepted
        return sent + Counter(handshakes=BYTES_OF_HANDSHAKE * connections)


async def start_talkers(peers: int, target: int, slowness: Callable[[int], float]) -> list[Talker]:
    """Peers of one run, each a node of the table; the others are told of their signatures by one shared validator."""
    network, validator = Network(LINK), CompositeValidator()
    nodes = await start_dht_nodes(network, peers, record_validator=validator)
    talkers = []
    for index, node in enumerate(nodes):
        host = network.host_of(node.peer_id)

        async def start(index: int = index, node: DHTNode = node, host: Host = host) -> Talker:
            talker = Talker(host, node, target, slowness(index) / REPORTS_PER_SECOND)
            await talker.exchange.start()
            return talker

        talkers.append(await host.run(start()))
    return talkers


async def _measure(talkers: list[Talker], seconds: float) -> Talk:
    before = [talker.sent for talker in talkers]
    await asyncio.sleep(seconds)
    sent = [talker.sent - earlier for talker, earlier in zip(talkers, before, strict=True)]
    rates = [each.total() / seconds for each in sent]
    together: Counter[str] = sum(sent, Counter())
    by_handler = {name: size / seconds / len(talkers) for name, size in together.most_common()}
    return Talk(len(talkers), sum(rates) / len(rates), max(rates), by_handler)


def talk_without_end(peers: int, *, working: bool, seconds: float = 120.0, seed: int = 0) -> Talk:
    """What peers say while no epoch ends.

    Args:
        working: they report progress; otherwise they only listen.
    """

    async def main() -> Talk:
        talkers = await start_talkers(peers, NEVER, lambda _: 1.0)
        if working:
            for talker in talkers:
                talker.host.spawn(talker.work())
        await asyncio.sleep(SETTLING_SECONDS)
        return await _measure(talkers, seconds)

    return run(main(), seed=seed)
