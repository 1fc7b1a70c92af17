"""Reducers that give different averages to different members, on purpose, and members that accuse them falsely."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest
import torch
from blake3 import blake3

from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.verification import Verification
from shoal.compression.base import bytes_of
from shoal.testing import Host, Link
from tests.drills import mostly_drills
from tests.simulation.rounds import Member, assert_same_bytes, left_out, run_round

SIZE = 4
LINK = Link(delay=(0.02, 0.15), jitter=0.01)
VERIFY = {"verify_reducers": True}


@dataclasses.dataclass
class Liar:
    """A member that gives wrong averages to some of the others.

    Args:
        victims: whom it gives them to.
        signs: what it says of them: "each", to everybody what it gave there; "one", to all the same; "none".
        hides: as the coordinator it sees no difference.
    """

    victims: tuple[int, ...]
    signs: str = "each"
    hides: bool = False
    member: Member | None = None
    gave: int = 0


def interfere_with(monkeypatch, liar: Liar, index: int):
    begin = AllReduce.__init__

    def lie(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.group.peer_ids[self.own_index] == liar.member.node.p2p.peer_id:
            spoil(self, liar, [m.node.p2p.peer_id for m in members_of[0] if m.index in liar.victims])

    members_of: list[list[Member]] = []

    def interfere(network, members):
        liar.member = members[index]
        members_of.append(members)
        monkeypatch.setattr(AllReduce, "__init__", lie)

    return interfere


def spoil(allreduce: AllReduce, liar: Liar, victims) -> None:
    """Let an all-reduce, at the liar, give other averages to some."""
    peers, own, verification = allreduce.group.peer_ids, allreduce.own_index, allreduce.verification
    reply, begin_stripe = allreduce.reducer.reply, allreduce.begin_stripe
    digests: dict[int, dict[int, bytes]] = {}

    async def different_reply(index, sender):
        encoded, status = await reply(index, sender)
        part = allreduce.vector.parts[own][index]
        values = part.codec.extract(encoded).clone()
        if peers[sender] in victims:
            liar.gave += 1
            values += 1 + sender
            encoded = part.compress(values)
        digests.setdefault(sender, {})[index] = blake3(bytes(2) + bytes(bytes_of(values))).digest()
        return encoded, status

    def sign_for(sender: int) -> bytes:
        known = digests[sender]
        what = blake3(b"".join(known[i] for i in range(len(known)))).digest()
        return verification.sign(verification.statement(own, what))

    def begin(sender, message):
        intake = begin_stripe(sender, message)
        if liar.signs == "each" and verification is not None:
            intake.sign = lambda: sign_for(sender)
        if liar.signs == "none":
            intake.sign = None
        return intake

    allreduce.reducer.reply, allreduce.begin_stripe = different_reply, begin
    if liar.hides and verification is not None:
        verification.find_proof = lambda members: None
        verification.find_complaints = lambda members: []


def honest_of(members: list[Member], index: int) -> list[Member]:
    return [member for member in members if member.index != index]


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("seed", mostly_drills(range(6), quick=2))
def test_without_the_option_models_drift_apart_and_nobody_notices(monkeypatch, caplog, seed):
    liar = Liar(victims=(1, 2))
    members = run_round(seed, SIZE, link=LINK, interfere=interfere_with(monkeypatch, liar, 0))
    assert liar.gave
    assert not torch.equal(members[1].values, members[3].values)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("victims", [(1,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("seed", mostly_drills(range(6), quick=2))
def test_who_signs_two_averages_is_convicted_and_its_part_is_averaged_again(monkeypatch, caplog, seed, victims, hides):
    liar = Liar(victims, hides=hides)
    members = run_round(seed, SIZE, link=LINK, interfere=interfere_with(monkeypatch, liar, 0), **VERIFY)
    honest, culprit = honest_of(members, 0), members[0].node.p2p.peer_id
    assert liar.gave
    assert_same_bytes(honest)
    left_out(honest[0], SIZE, {0})
    for member in honest:
        assert member.result.share_averaged == 1
        assert member.result.failed_peers == (culprit,)
        assert member.node.p2p.metrics.members_untrue == 1
        assert culprit in member.node.lanes[""].matchmaking.refusals.next_search()
    told = sum(f"{culprit} has given different averages" in line for line in warnings_of(caplog))
    assert told == sum(member.node.p2p.metrics.members_untrue for member in members)


def test_some_of_these_liars_are_the_first_to_coordinate(monkeypatch):
    coordinates = set()
    for seed in range(6):
        with monkeypatch.context() as patch:
            members = run_round(seed, SIZE, link=LINK, interfere=interfere_with(patch, Liar((1,)), 0), **VERIFY)
        coordinates.add(members[1].result.peers[0] == members[0].node.p2p.peer_id)
    assert coordinates == {True, False}


@pytest.mark.parametrize("signs", ["one", "none"])
@pytest.mark.parametrize("seed", mostly_drills(range(6), quick=2))
def test_what_is_not_signed_does_not_count(monkeypatch, caplog, seed, signs):
    """There is no proof: who got it takes the averages that others hold, or all make them anew."""
    liar = Liar((1, 2), signs=signs)
    members = run_round(seed, SIZE, link=LINK, interfere=interfere_with(monkeypatch, liar, 0), **VERIFY)
    honest = honest_of(members, 0)
    assert liar.gave
    assert_same_bytes(honest)
    left_out(honest[0], SIZE, {0})
    for member in honest:
        assert member.result.share_averaged == 1
    victims = [member for member in honest if member.index in liar.victims]
    for member in honest:
        sees_it = member in victims and signs == "one"
        assert member.node.p2p.metrics.members_untrue == sees_it, "others know it by hearsay only"
    assert any(f"{members[0].node.p2p.peer_id} has given other" in line for line in warnings_of(caplog)) == (
        signs == "one"
    )
    assert all(members[0].node.p2p.peer_id in member.result.failed_peers for member in victims)


@pytest.mark.parametrize("seed", mostly_drills(range(6), quick=2))
def test_who_accuses_a_reducer_without_proof_harms_only_itself(monkeypatch, seed):
    complete = Verification.complete_report
    accuser: list[Member] = []

    def accuse(self, report):
        complete(self, report)
        if self._peers[self._own] == accuser[0].node.p2p.peer_id:
            report.hashes = [bytes(32) if i != self._own and what else what for i, what in enumerate(report.hashes)]
        return report

    def interfere(network, members):
        accuser.append(members[0])
        monkeypatch.setattr(Verification, "complete_report", accuse)

    members = run_round(seed, SIZE, link=LINK, interfere=interfere, **VERIFY)
    honest = honest_of(members, 0)
    assert_same_bytes(honest)
    left_out(honest[0], SIZE, {0})
    for member in honest:
        assert member.result.share_averaged == 1
        assert not member.node.p2p.metrics.members_untrue
        # As the coordinator it can say of anybody that he is dead.
        if member.result.peers[0] != accuser[0].node.p2p.peer_id:
            assert {member.node.p2p.peer_id for member in honest}.isdisjoint(member.result.failed_peers)


@pytest.mark.parametrize("seed", mostly_drills(range(6), quick=2))
def test_a_friend_of_the_convicted_that_insists_on_its_averages_is_left_out(monkeypatch, seed):
    liar = Liar((1,))
    prepare = interfere_with(monkeypatch, liar, 0)
    complete, first = Verification.complete_report, {}
    friend: list[Member] = []

    def insist(self, report):
        complete(self, report)
        if self._peers[self._own] == friend[0].node.p2p.peer_id:
            culprit = self._peers.index(liar.member.node.p2p.peer_id)
            known = first.setdefault(self._round_id, (report.hashes[culprit], report.signatures[culprit]))
            report.hashes[culprit], report.signatures[culprit] = known
        return report

    def interfere(network, members):
        prepare(network, members)
        friend.append(members[3])
        monkeypatch.setattr(Verification, "complete_report", insist)

    members = run_round(seed, SIZE, link=LINK, interfere=interfere, **VERIFY)
    honest = members[1:3]
    assert_same_bytes(honest)
    left_out(honest[0], SIZE, {0, 3})
    # As the coordinator the friend can say of anybody that he is dead.
    if honest[0].result.peers[0] != friend[0].node.p2p.peer_id:
        for member in honest:
            assert member.result.share_averaged == 1
            assert not {each.node.p2p.peer_id for each in honest} & set(member.result.failed_peers)


@pytest.mark.parametrize("seed", mostly_drills(range(12), quick=4))
def test_a_liar_that_dies_before_it_has_signed_leaves_nothing_behind(monkeypatch, seed):
    liar = Liar((1, 2))
    prepare = interfere_with(monkeypatch, liar, 0)

    def interfere(network, members):
        prepare(network, members)
        give_up_after = network.rng.randrange(1, 12)

        def die_when_due(liar: Liar = liar, host: Host = members[0].host) -> None:
            if liar.gave >= give_up_after and host.is_up:
                host.crash()

        counting(monkeypatch, liar, die_when_due)

    members = run_round(seed, SIZE, link=LINK, interfere=interfere, **VERIFY)
    honest = honest_of(members, 0)
    assert_same_bytes(honest)
    left_out(honest[0], SIZE, {0})
    assert all(member.result.share_averaged == 1 for member in honest)


def counting(monkeypatch, liar: Liar, then) -> None:
    take = Verification.note

    def note(self, *args, **kwargs):
        take(self, *args, **kwargs)
        then()

    monkeypatch.setattr(Verification, "note", note)


@pytest.mark.parametrize("seed", mostly_drills(range(10), quick=3))
def test_honest_members_lose_nothing_when_some_die(seed):
    def interfere(network, members):
        for member in network.rng.sample(members, 2):
            asyncio.get_running_loop().call_at(network.rng.uniform(1.0, 8.0), member.host.crash)

    members = run_round(seed, 6, link=LINK, interfere=interfere, **VERIFY)
    living = [member for member in members if member.host.is_up and member.step.exception() is None]
    assert len(living) >= 3
    assert_same_bytes(living)
    assert all(member.result.share_averaged == 1 for member in living)
    assert all(not member.node.p2p.metrics.members_untrue for member in living)
