"""Rounds with bad values on simulated networks: with deaths, and with members that send bad averages on purpose."""

from __future__ import annotations

import pytest
import torch

from shoal.averaging.round.coordinator import Recovery
from shoal.averaging.round.exchange import AllReduce
from shoal.averaging.round.session import GroupSession
from shoal.compression import Float16Compression, NoCompression
from shoal.testing import Link
from tests.simulation.deaths import deaths
from tests.simulation.rounds import (
    STAGGER,
    VALUES_PER_MEMBER,
    WIDE_AREA,
    WINDOW,
    assert_same_bytes,
    left_out,
    own_value,
    run_round,
)

NO_LOSS = Link(delay=WIDE_AREA.delay, jitter=0.01)
SIZE = 5


@pytest.mark.parametrize("seed", range(8))
def test_what_the_dead_left_undone_is_finished_without_the_values_of_a_bad_member(seed):
    """The bad one may be asked for its values again, coordinate the round, or fill gaps with averages that it holds."""
    bad = seed % SIZE

    def interfere(network, members):
        members[bad].values.fill_(torch.nan)
        deaths(2, WINDOW - 0.2, WINDOW + STAGGER + 1, "crash")(network, [m for m in members if m.index != bad])

    members = run_round(seed, SIZE, link=NO_LOSS, interfere=interfere)
    living = [member for member in members if member.host.is_up]
    dead = {member.index for member in members} - {member.index for member in living}
    assert len({member.result.group_id for member in living}) == 1
    assert_same_bytes(living)
    assert left_out(living[0], SIZE, dead, surely={bad})
    for member in living:
        weights = dict(zip(member.result.peers, member.result.weights, strict=True))
        assert weights[members[bad].node.p2p.peer_id] == 0


@pytest.mark.parametrize("seed", range(6))
def test_if_all_are_bad_no_death_makes_an_average_of_it(seed):
    def interfere(network, members):
        for member in members:
            member.values[member.index] = torch.inf
        deaths(1, WINDOW - 0.2, WINDOW + STAGGER + 1, "crash")(network, members)

    for member in run_round(seed, SIZE, link=NO_LOSS, interfere=interfere, min_group_size=SIZE - 1):
        if member.host.is_up:
            expected = torch.full((SIZE * VALUES_PER_MEMBER,), own_value(member.index))
            expected[member.index] = torch.inf
            assert torch.equal(member.values, expected)


@pytest.mark.parametrize("victims", ["all", "one"])
@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()], ids=["exact", "lossy"])
@pytest.mark.parametrize("seed", range(SIZE))
def test_averages_that_are_not_finite_are_not_applied_and_their_sender_is_named(monkeypatch, victims, codec, seed):
    """Whether it is the coordinator or not, and however often it is asked: others do its share again."""
    liar = [seed]

    def interfere(network, members):
        liar[0] = members[seed].node.p2p.peer_id
        chosen = [member.node.p2p.peer_id for member in members if member.index != seed]
        lie(monkeypatch, liar[0], chosen if victims == "all" else chosen[:1])

    members = run_round(seed, SIZE, link=NO_LOSS, interfere=interfere, compression=codec)
    honest = [member for member in members if member.index != seed]
    for member in honest:
        assert set(member.result.not_finite_peers) <= {liar[0]}
        assert member.values.isfinite().all()
    victim, *others = honest
    assert victim.result.not_finite_peers == (liar[0],)
    assert set(victim.node.lanes[""].matchmaking.refusals.next_search()) == {liar[0]}
    if victim.result.share_averaged < 1:  # the liar coordinates, and the others have gone, content with what they got
        assert victims == "one"
        assert liar[0] in victim.result.failed_peers
        assert victim.values.tolist().count(own_value(victim.index)) <= VALUES_PER_MEMBER + 16  # one part more, perhaps
        honest = others
    if not codec.lossy:
        assert_same_bytes(honest)
    for member in honest:
        assert member.result.share_averaged == 1
        assert codec.lossy or left_out(member, SIZE, {seed})


def lie(monkeypatch, liar, victims):
    """Let one member send NaN wherever others want averages of it."""
    init, obtain = AllReduce.__init__, Recovery.obtain

    def init_liar(self, *args, **kwargs):
        init(self, *args, **kwargs)
        peers = self.group.peer_ids
        if peers[self.own_index] != liar:
            return
        reply, encode = self.reducer.reply, self.vector.encode

        async def spoilt_reply(index, sender):
            encoded, status = await reply(index, sender)
            if encoded is not None and peers[sender] in victims:
                encoded = spoilt(self.vector.parts[self.own_index][index])
            return encoded, status

        def spoilt_encode(part):
            index = self.vector.parts[part.reducer].index(part)
            return spoilt(part) if index < self.vector.held[part.reducer] else encode(part)

        self.reducer.reply, self.vector.encode = spoilt_reply, spoilt_encode

    async def spoilt_obtain(self, key):
        average = await obtain(self, key)
        is_liar = self._vector.encode.__name__ == "spoilt_encode"
        return average * torch.nan if is_liar and average is not None else average

    monkeypatch.setattr(AllReduce, "__init__", init_liar)
    monkeypatch.setattr(Recovery, "obtain", spoilt_obtain)


def spoilt(part):
    return part.compress(torch.full((part.length,), torch.nan))


@pytest.mark.parametrize("seed", range(SIZE))
def test_a_single_bad_value_that_its_sender_overlooks_is_left_out_everywhere(monkeypatch, seed):
    check = GroupSession.check_values
    oblivious = []

    async def overlook(self, tensors, infos):
        is_oblivious = self.group.peer_ids[self.own_index] in oblivious
        return is_oblivious or await check(self, tensors, infos)

    def interfere(network, members):
        oblivious.append(members[seed].node.p2p.peer_id)
        members[seed].values[seed * VALUES_PER_MEMBER] = torch.nan

    monkeypatch.setattr(GroupSession, "check_values", overlook)
    members = run_round(seed, SIZE, link=NO_LOSS, interfere=interfere)
    for member in members:
        assert left_out(member, SIZE, {seed})
        assert member.result.share_averaged == 1
        assert not member.result.failed_peers
    honest = [member for member in members if member.index != seed]
    named = {peer for member in honest for peer in member.result.not_finite_peers}
    assert named <= set(oblivious)  # it may be the one that reduces this part
    if named:
        assert all(member.result.not_finite_peers == tuple(oblivious) for member in honest)
    assert_same_bytes(members)
