"""Peers that tell each other of their progress, as trackers over a real table do, and the bytes that it takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.dht import DHTNode
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.validation import CompositeValidator
from shoal.metrics import Metrics
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import PerformanceEMA, RefreshPolicy
from shoal.optim.progress.schema import endorse
from shoal.testing import Host, Link, Network, run, start_dht_nodes

RUN = "benchmark"
LINK = Link(delay=(0.01, 0.05), jitter=0.005)
REPORTS_PER_SECOND = 5
BATCH = 16
SETTLING_SECONDS = 60.0
"""Until everybody knows everybody; what is said before does not count."""
PATIENCE = 1.0
MOOD_SECONDS = 5.0
ROUND_SECONDS = 0.2
AFTERMATH_SECONDS = 0.5
"""What is said so long after the end of an epoch is part of it."""
WARM_UP_EPOCHS = 2
NEVER = 10**12

TABLE_CALLS = ("rpc_find", "rpc_store", "rpc_ping")
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
    target: int = NEVER
    """Samples that make an epoch."""


def without_table(sent: Mapping[str, float]) -> float:
    """What has been sent, less what the table is asked and told: no epoch's end makes a difference to that."""
    return sum(size for name, size in sent.items() if name not in TABLE_CALLS)


def bytes_sent(metrics: Metrics) -> Counter[str]:
    """What a peer has sent, by the method that was called."""
    sent = Counter({name.rpartition(".")[2]: size for name, size in metrics.bytes_sent_by_handler.items()})
    connections = metrics.connections_dialled + metrics.connections_accepted
    return sent + Counter(handshakes=BYTES_OF_HANDSHAKE * connections)


def talk_between(before: Sequence[Counter[str]], after: Sequence[Counter[str]], seconds: float) -> Talk:
    """What peers have said between two looks at :func:`bytes_sent`."""
    sent = [late - early for early, late in zip(before, after, strict=True)]
    rates = [each.total() / seconds for each in sent]
    together: Counter[str] = sum(sent, Counter())
    by_handler = {name: size / seconds / len(sent) for name, size in together.most_common()}
    return Talk(len(sent), sum(rates) / len(rates), max(rates), by_handler)


class Talker:
    """The tracker of one peer, without its facade, and a loop that trains."""

    def __init__(self, host: Host, node: DHTNode, target: int, seconds: float, unsteadiness: float) -> None:
        self.host, self.node, self.target, self.seconds = host, node, target, seconds
        self.unsteadiness = unsteadiness
        self._mood, self._mood_until = 1.0, 0.0
        self.samples = 0
        signatures = SignatureValidator(PrivateKey())
        node.protocol.record_validator.extend([signatures])
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
        rng, loop = self.host.rng, asyncio.get_running_loop()
        while True:
            if loop.time() >= self._mood_until:
                self._mood = rng.uniform(1 - self.unsteadiness, 1 + self.unsteadiness)
                self._mood_until = loop.time() + MOOD_SECONDS
            await asyncio.sleep(self.seconds * self._mood * rng.uniform(0.9, 1.1))
            self.samples += BATCH
            self.board.report(self.board.own.epoch, self.samples, self.host.dht_time())
            self.exchange.report_due.set()
            if self.target < NEVER and self.board.should_stop(self.host.dht_time(), PATIENCE):
                return

    def declare_over(self) -> None:
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
        return bytes_sent(self.node.p2p.metrics)


async def start_talkers(
    peers: int, target: int, slowness: Callable[[int], float] = lambda _: 1.0, unsteadiness: float = 0.0
) -> list[Talker]:
    """Peers of one run, each a node of the table; the others are told of their signatures by one shared validator."""
    network, validator = Network(LINK), CompositeValidator()
    nodes = await start_dht_nodes(network, peers, record_validator=validator)
    talkers = []
    for index, node in enumerate(nodes):
        host = network.host_of(node.peer_id)

        async def start(index: int = index, node: DHTNode = node, host: Host = host) -> Talker:
            talker = Talker(host, node, target, slowness(index) / REPORTS_PER_SECOND, unsteadiness)
            await talker.exchange.start()
            return talker

        talkers.append(await host.run(start()))
    return talkers


async def _measure(talkers: list[Talker], seconds: float) -> Talk:
    before = [talker.sent for talker in talkers]
    await asyncio.sleep(seconds)
    return talk_between(before, [talker.sent for talker in talkers], seconds)


class Epochs:
    """Global steps that everybody makes: they end when the last peer has stopped, and take a while."""

    def __init__(self, talkers: list[Talker]) -> None:
        self.talkers = talkers
        self.samples: list[int] = []
        self.sent: list[float] = []
        """Bytes of the mean peer around the end of each epoch, without the table's: it goes by the clock."""
        self._stopped: list[Talker] = []
        self._over = asyncio.Event()

    def _sent(self) -> float:
        sent = [without_table(talker.sent) for talker in self.talkers]
        return sum(sent) / len(self.talkers)

    async def train(self, talker: Talker) -> None:
        while True:
            await talker.work()
            if not self._stopped:
                asyncio.get_running_loop().create_task(self._count())
            talker.declare_over()
            self._stopped.append(talker)
            if len(self._stopped) == len(self.talkers):
                await asyncio.sleep(ROUND_SECONDS)
                self.samples.append(sum(each.samples for each in self.talkers))
                over, self._over, self._stopped = self._over, asyncio.Event(), []
                over.set()
            else:
                await self._over.wait()
            talker.next_epoch({each.node.peer_id.to_bytes() for each in self.talkers if each is not talker})

    async def _count(self) -> None:
        before, over = self._sent(), self._over
        await over.wait()
        await asyncio.sleep(AFTERMATH_SECONDS)
        self.sent.append(self._sent() - before)


def talk_in_epochs(
    peers: int,
    *,
    seconds: float = 20.0,
    epochs: int = 10,
    slowness: Sequence[float] = (1.0,),
    unsteadiness: float = 0.0,
    seed: int = 0,
) -> Talk:
    """What peers say while epochs end.

    Args:
        seconds: that an epoch takes.
        slowness: by how much peers are slower than the fastest ones, in turn.
        unsteadiness: a peer is faster or slower by up to this share for a few seconds, then by another one.
    """

    async def main() -> Talk:
        speeds = [BATCH * REPORTS_PER_SECOND / slowness[index % len(slowness)] for index in range(peers)]
        target = round(sum(speeds) * seconds)
        talkers = await start_talkers(peers, target, lambda i: slowness[i % len(slowness)], unsteadiness)
        course = Epochs(talkers)
        for talker in talkers:
            talker.host.spawn(course.train(talker))
        while len(course.samples) < WARM_UP_EPOCHS:
            await asyncio.sleep(0.1)
        course.sent.clear()
        talk = await _measure(talkers, seconds * epochs)
        talk.samples = course.samples[WARM_UP_EPOCHS:]
        talk.target = target
        talk.bytes_per_member = sum(course.sent) / len(course.sent) / (peers - 1)
        return talk

    return run(main(), seed=seed)


def talk_without_end(
    peers: int, *, working: bool, seconds: float = 120.0, slowness: float = 1.0, seed: int = 0
) -> Talk:
    """What peers say while no epoch ends.

    Args:
        working: they report progress; otherwise they only listen.
        seconds: for which they are listened to, when all know each other.
        slowness: they report so many times less often.
    """

    async def main() -> Talk:
        talkers = await start_talkers(peers, NEVER, lambda _: slowness)
        if working:
            for talker in talkers:
                talker.host.spawn(talker.work())
        await asyncio.sleep(SETTLING_SECONDS)
        return await _measure(talkers, seconds)

    return run(main(), seed=seed)
