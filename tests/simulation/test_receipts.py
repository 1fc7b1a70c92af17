"""Receipts of rounds: everybody gets one that its coordinator has signed, also when members die; and who is known by
them in a run of several groups."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import defaultdict

import pytest
import torch

from shoal.averaging.round.receipts import Receipt
from shoal.dht.crypto import PrivateKey, SignatureValidator
from shoal.dht.validation import CompositeValidator
from shoal.errors import AllreduceException
from shoal.optim.history.fork_choice import weights_of
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.exchange import ProgressExchange
from shoal.optim.progress.records import LocalTrainingProgress, PerformanceEMA, RefreshPolicy
from shoal.optim.progress.schema import endorse
from shoal.optim.vouching import Vouching
from shoal.p2p import Identity
from shoal.testing import Link, Network, run, start_averager, start_dht_nodes, start_step
from tests.drills import mostly_drills
from tests.simulation.deaths import check_survivors
from tests.simulation.rounds import STAGGER, WINDOW, Member, run_round

LINK = Link(delay=(0.02, 0.15), jitter=0.01)
# Nobody waits for a receipt.
LINGER = 2.0


def round_with_receipts(seed: int, size: int, deaths: int = 0) -> tuple[list[Member], dict[int, list[Receipt]]]:
    receipts: dict[int, list[Receipt]] = defaultdict(list)

    def interfere(network, members):
        for member in members:
            member.node.on_receipt = functools.partial(lambda index, r: receipts[index].append(r), member.index)
            member.node.next_epoch = lambda: 7
        for member in network.rng.sample(members, deaths):
            due = network.rng.uniform(1.0, WINDOW + STAGGER + 1)
            asyncio.get_running_loop().call_at(due, member.host.crash)

    return run_round(seed, size, link=LINK, interfere=interfere, linger=LINGER), receipts


@pytest.mark.parametrize("seed", mostly_drills(range(5), quick=2))
def test_all_members_have_the_same_receipt(seed):
    members, receipts = round_with_receipts(seed, 5)
    for member in members:
        [receipt] = receipts[member.index]
        assert receipt == receipts[0][0]
        assert receipt.is_genuine("simulation")
        assert not receipt.is_genuine("another run")
        assert receipt.round_id.startswith(member.result.group_id)
        assert (receipt.epoch, receipt.coordinator) == (7, 0)
        assert receipt.members == tuple(peer.to_bytes() for peer in member.result.peers)
        assert receipt.weights == member.result.weights == (1.0,) * 5


@pytest.mark.parametrize("seed", mostly_drills(range(20), quick=5))
def test_receipts_of_rounds_in_which_members_die_name_who_was_there(seed):
    members, receipts = round_with_receipts(seed, 6, deaths=3)
    check_survivors(members, 1000)
    for member in members:
        for receipt in receipts[member.index]:
            assert receipt.is_genuine("simulation")
            assert member.node.p2p.peer_id.to_bytes() in receipt.members
            if member.host.is_up:
                assert dict(zip(receipt.members, receipt.weights, strict=True))[member.node.p2p.peer_id.to_bytes()] == 1


def test_where_coordinators_die_the_next_one_signs():
    signers = set()
    for seed in range(20):
        members, receipts = round_with_receipts(seed, 6, deaths=3)
        living = [member.index for member in members if member.host.is_up]
        signers |= {receipt.coordinator for index in living for receipt in receipts[index]}
    assert len(signers) > 1


def test_nothing_is_signed_where_nobody_wants_it():
    sizes = {}
    for wants in (False, True):
        receipts = []

        def interfere(network, members, wants=wants, receipts=receipts):
            for member in members if wants else ():
                member.node.on_receipt = receipts.append

        members = run_round(0, 5, link=LINK, interfere=interfere, linger=LINGER)
        assert bool(receipts) == wants
        sizes[wants] = sum(member.node.p2p.metrics.bytes_sent for member in members) / len(members)
    assert 0 < sizes[True] - sizes[False] < 100, "bytes for each member"


# --- a run in several groups ------------------------------------------------------------------------------------------

GROUP, PEERS, EPOCHS, EPOCH_SECONDS, SAMPLES = 4, 12, 6, 40.0, 100


class Trainer:
    """A peer that averages in groups, and its tracker."""

    def __init__(self, network, node, averager, has_receipts: bool) -> None:
        self.network, self.node, self.averager = network, node, averager
        self.host = network.host_of(node.peer_id)
        signatures = SignatureValidator(PrivateKey())
        node.protocol.record_validator.extend([signatures])
        ema = PerformanceEMA(clock=asyncio.get_running_loop().time)
        self.id = node.peer_id.to_bytes()
        self.board = ProgressBoard(self.id, False, PEERS * SAMPLES, RefreshPolicy(), ema, self.host.dht_time())
        tag = signatures.local_public_key
        self.exchange = ProgressExchange(
            node,
            node.p2p,
            "run",
            self.board,
            owner_tag=tag,
            endorsement=endorse(node.p2p.identity, tag),
            min_period=0.5,
            metadata_expiration=60.0,
        )
        self.board.guard.full_group, self.board.guard.has_receipts = GROUP, has_receipts
        if has_receipts:
            self.exchange.vouching = Vouching(
                self.id,
                "simulation",
                node.p2p.identity.sign,
                self.board.guard,
                lambda: self.board.own.epoch,
                GROUP,
                self.host.dht_time,
            )
            averager.on_receipt = self.exchange.vouching.take
            averager.next_epoch = lambda: self.board.own.epoch + 1

    async def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            await asyncio.sleep(EPOCH_SECONDS * self.host.rng.uniform(0.95, 1.0))
            self.board.report(epoch, SAMPLES, self.host.dht_time())
            self.exchange.report_due.set()
            self.exchange.call_due.set()
            self.board.begin_update(self.host.dht_time(), 5.0)
            step = start_step(self.network, self.averager, weight=float(SAMPLES))
            with contextlib.suppress(AllreduceException):  # alone in its bucket
                await asyncio.wrap_future(step)
            weights = {} if step.round is None else weights_of(step.round)
            self.board.note_round(weights, self.host.dht_time())
            mates = weights.keys() - {self.id}
            self.board.finish_update(epoch + 1, mates, self.host.dht_time())
            self.exchange.call_due.set()
        await asyncio.sleep(EPOCH_SECONDS)

    @property
    def bytes_told(self) -> int:
        sent = self.node.p2p.metrics.bytes_sent_by_handler
        return sum(size for name, size in sent.items() if name.startswith("run_progress"))


def train_in_groups(seed: int, epochs: int, *, has_receipts: bool) -> list[Trainer]:
    async def main() -> list[Trainer]:
        network = Network(LINK)
        nodes = await start_dht_nodes(network, PEERS, record_validator=CompositeValidator())
        trainers = []
        for node in nodes:
            host = network.host_of(node.peer_id)
            settings = {"target_group_size": GROUP, "initial_group_bits": "00"}
            averager = await start_averager(host, [torch.zeros(64)], node, **settings)

            async def start(node=node, averager=averager):
                trainer = Trainer(network, node, averager, has_receipts)
                await trainer.exchange.start()
                return trainer

            trainers.append(await host.run(start()))
        await asyncio.gather(*[trainer.host.spawn(trainer.train(epochs)) for trainer in trainers])
        return trainers

    return run(main(), seed=seed, time_limit=3600)


def claim(trainer: Trainer, peer: bytes, samples: int) -> int:
    """How many samples of a peer that claims so many count at a trainer."""
    board, now = trainer.board, trainer.host.dht_time()
    before = board.global_progress(now).samples_accumulated
    board.hear(LocalTrainingProgress(peer, board.own.epoch, samples, 0.0, now, False), now + 60, now)
    return board.global_progress(now).samples_accumulated - before


@pytest.mark.slow_drill
def test_after_some_rounds_in_groups_nearly_everybody_is_known_by_receipts():
    trainers = train_in_groups(0, EPOCHS, has_receipts=True)
    others = [(trainer, other.id) for trainer in trainers for other in trainers if other is not trainer]
    known = [trainer.board.guard.is_known(other) for trainer, other in others]
    met = [trainer.board.guard.has_met(other) for trainer, other in others]
    assert sum(known) >= 0.95 * len(others)
    assert sum(known) > sum(met)
    for trainer, other in [pair for pair, is_known in zip(others, known, strict=True) if is_known][:20]:
        assert claim(trainer, other, SAMPLES) == SAMPLES
    stranger = Identity.generate(random.Random(0)).peer_id.to_bytes()
    for trainer in trainers:
        assert claim(trainer, stranger, 10**9) <= PEERS * SAMPLES
    plain = train_in_groups(0, EPOCHS, has_receipts=False)
    more = sum(a.bytes_told for a in trainers) - sum(b.bytes_told for b in plain)
    assert more / PEERS / EPOCHS / PEERS < 1000, "bytes for each member and round"
