"""Members that die in the middle of a round, and what must hold for those that live."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict

import torch

from shoal.errors import AllreduceException
from shoal.testing import Host, Network
from tests.simulation.rounds import (
    STAGGER,
    WINDOW,
    Interfere,
    Member,
    assert_same_bytes,
    left_out,
    own_value,
    run_round,
)

NOTICE_CRASH_SECONDS = 5.0
"""Survivors of a crash are done so long after the latest time at which they would be done without it."""
NOTICE_SILENCE_SECONDS = 45.0


def run_round_with_deaths(seed: int, size: int, dying: int) -> int:
    """A round on failing links in which members die at random times, from the beginning on, in one way or the other.

    Returns:
        How many survivors have averaged with somebody.

    Raises:
        AssertionError: a survivor was not done in time, or has something else than an average over those who delivered.
    """
    last = WINDOW + STAGGER + 1
    members = run_round(seed, size, interfere=deaths(dying, 0.0, last, "crash", "power_off"))
    return check_survivors(members, 3 * WINDOW + STAGGER + NOTICE_SILENCE_SECONDS)


def deaths(count: int, first: float, last: float, *kinds: str) -> Interfere:
    """Let random members die at random times between ``first`` and ``last``."""

    def interfere(network: Network, members: list[Member]) -> None:
        loop, rng = asyncio.get_running_loop(), network.rng
        for member in rng.sample(members, count):
            kind = rng.choice(kinds)
            loop.call_at(rng.uniform(first, last), functools.partial(getattr(Host, kind), member.host))

    return interfere


def check_survivors(members: list[Member], latest_end: float) -> int:
    """Check what the living have after the round; returns how many of them have averaged with somebody."""
    groups: dict[bytes, list[Member]] = defaultdict(list)
    for member in members:
        if not member.host.is_up:
            continue
        assert member.ended < latest_end
        assert member.step is not None
        if isinstance(member.step.exception(), AllreduceException):  # everybody else was dead or gone
            assert set(member.values.tolist()) == set(torch.tensor([own_value(member.index)]).tolist())
        else:
            groups[member.result.group_id].append(member)
    for group in groups.values():
        check_group(group, members)
    return sum(map(len, groups.values()))


def check_group(group: list[Member], members: list[Member]) -> None:
    """All survivors of a group have the same bytes: for each part, the average of all of them and some of the dead."""
    assert_same_bytes(group)
    assert all(member.result.share_averaged == 1 for member in group)
    peers = group[0].result.peers
    strangers = {member.index for member in members if member.node.p2p.peer_id not in peers}
    dead = {member.index for member in members if not member.host.is_up}
    left_out(group[0], len(members), dead, surely=strangers)
