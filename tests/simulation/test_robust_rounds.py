"""Rounds by other rules than the mean in which members die, freeze or come late: who finishes has the same bytes."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
import torch

from shoal.averaging import CenteredClip, ClipToMedianNorm, TrimmedMean
from shoal.averaging.round.coordinator import Recovery
from shoal.testing import Link
from tests.drills import mostly_drills
from tests.simulation.deaths import NOTICE_SILENCE_SECONDS, deaths
from tests.simulation.rounds import STAGGER, WIDE_AREA, WINDOW, assert_same_bytes, run_round, when_all_average

NO_LOSS = Link(delay=WIDE_AREA.delay, jitter=0.01)
RULES = [ClipToMedianNorm(), TrimmedMean(0.2), CenteredClip(4.0)]
SIZE = 7
LIAR = 3


def value_of(index):
    """What all values of a member are."""
    return 1000.0 if index == LIAR else 1.0 + index / 8


def run_robust_round(seed, rule, interfere=lambda network, members: None, **options):
    def begin(network, members):
        for member in members:
            member.values.fill_(value_of(member.index))
        interfere(network, members)

    return run_round(seed, SIZE, interfere=begin, aggregation=rule, **options)


def possible_averages(rule, everybody, surely, length):
    """What a part may be: some of those who died have delivered it, and some of them have told their norms."""
    perhaps = sorted(everybody - surely)
    chosen = [set(some) for n in range(len(perhaps) + 1) for some in itertools.combinations(perhaps, n)]
    for counted in chosen:
        for told in (each for each in chosen if each >= counted):
            known = sorted(surely | told)
            norms = [value_of(i) * math.sqrt(length) for i in known]
            factors = dict(zip(known, rule.factors(norms, [1.0] * len(known)), strict=True))
            members = sorted(surely | counted)
            rows = [torch.full((length,), value_of(i)) for i in members]
            yield float(rule.aggregate(rows, [1.0] * len(rows), [factors[i] for i in members], 1.0)[0])


def check(rule, members):
    """The living have the same bytes, and each part is an average by the rule."""
    living = [member for member in members if member.host.is_up]
    assert_same_bytes(living)
    assert all(member.result.share_averaged == 1 for member in living)
    index_of = {member.node.p2p.peer_id: member.index for member in members}
    everybody = {index_of[peer] for peer in living[0].result.peers}
    surely = {member.index for member in living} & everybody
    possible = torch.tensor(sorted(set(possible_averages(rule, everybody, surely, living[0].values.numel()))))
    distance = (living[0].values[:, None] - possible).abs().min(dim=1).values
    assert float(distance.max()) < 1e-3
    assert float(living[0].values.max()) < 10, "the liar has decided"
    assert not any(member.node.p2p.metrics.members_untrue for member in living), "nobody has lied about its norms"
    return living


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_without_deaths(rule):
    assert len(check(rule, run_robust_round(0, rule))) == SIZE


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("kind", mostly_drills(["crash", "power_off"]))
@pytest.mark.parametrize("seeds", mostly_drills([3, 8]))
def test_survivors_finish_the_round(rule, seeds, kind, monkeypatch):
    again = []
    execute = Recovery.run
    monkeypatch.setattr(Recovery, "run", lambda self: again.append(len(self._plan.again)) or execute(self))
    for seed in range(seeds):
        killing = deaths(2, WINDOW + STAGGER - 0.5, WINDOW + STAGGER + 0.6, kind)
        members = run_robust_round(seed, rule, killing, link=NO_LOSS)
        living = check(rule, members)
        assert max(member.ended for member in living) < 2 * WINDOW + STAGGER + NOTICE_SILENCE_SECONDS
    assert any(again), "no part was averaged again: the deaths came too late, or too early"


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("after", mostly_drills([0.05, 0.3]))
def test_coordinators_die_one_after_the_other(rule, after):
    def interfere(network, members):
        def then(rounds):
            loop = asyncio.get_running_loop()
            for number, index in enumerate(rounds[0].state.coordinators[:2]):
                host = network.host_of(rounds[0].group.peer_ids[index])
                loop.call_later(after + number * 0.2, host.crash)

        when_all_average(members, then)

    assert len(check(rule, run_robust_round(1, rule, interfere, link=NO_LOSS))) == SIZE - 2


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rounds_that_do_not_wait_for_everybody(rule):
    """Whoever is late gets the result of the others."""
    late = 0
    for seed in range(3):

        def interfere(network, members):
            def then(rounds):
                loop = asyncio.get_running_loop()
                victim = network.host_of(rounds[0].group.peer_ids[rounds[0].state.coordinators[-1]])
                network.partition([victim], [other for other in network.hosts if other is not victim])
                loop.call_later(3.0, network.heal)

            when_all_average(members, then)

        members = run_robust_round(seed, rule, interfere, link=NO_LOSS, quorum=SIZE - 2, quorum_grace=0.5)
        complete = [member for member in members if member.result.share_averaged == 1]
        late += sum(member.result.late for member in members)
        assert len(complete) >= SIZE - 1
        assert_same_bytes(complete)
        assert float(complete[0].values.max()) < 10
    assert late


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("seed", mostly_drills([0, 1, 3]))
def test_links_that_break(rule, seed):
    """By the mean these rounds succeed, too."""
    link = Link(delay=WIDE_AREA.delay, jitter=0.05, break_rate=0.05)
    members = run_robust_round(seed, rule, link=link)
    complete = [member for member in members if member.result.share_averaged == 1]
    assert len(complete) > 1
    assert_same_bytes(complete)
    assert float(complete[0].values.max()) < 10
    assert not any(member.node.p2p.metrics.members_untrue for member in members)
