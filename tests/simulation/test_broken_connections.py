"""Connections that break in the middle of a round: nobody is lost, and the result is the same to the bit."""

from __future__ import annotations

import asyncio
import functools
import random

import pytest
import torch

from shoal.averaging import CenteredClip, ClipToMedianNorm
from shoal.averaging.allreduce.pair import MAX_RESUMES, Pair
from shoal.averaging.allreduce.recovery import Recovery
from shoal.averaging.messages import RESUME_SECONDS
from shoal.compression import Float16Compression, Uniform8BitQuantization
from shoal.testing import Link
from tests.simulation.breaking import AUX, CLIENT, NODE, SIZE, Broken, at, cuts

KINDS = {
    "mean": {},
    "one call each": {"link": Link(delay=0.005)},
    "lossy codec": {"compression": Uniform8BitQuantization()},
    "half precision": {"compression": Float16Compression()},
    "verified": {"verify_reducers": True},
    "half of the way": {"averaging_alpha": 0.5},
    "quorum": {"quorum": 3, "quorum_grace": 5.0},
    "robust": {"aggregation": CenteredClip(4.0)},
    "robust with norms": {"aggregation": ClipToMedianNorm()},
    "client": {"modes": (NODE, NODE, CLIENT, NODE)},
    "auxiliary": {"modes": (NODE, AUX, NODE, NODE)},
    "two": {"modes": (NODE, NODE)},
    "small": {"values": 64},
}


@functools.lru_cache
def calm(kind: str) -> Broken:
    """The same round without any trouble."""
    return Broken(**KINDS[kind])


@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 3)])
def test_a_cut_at_any_moment_costs_nothing_but_time(pair):
    """Also of the connections to the coordinator, which is the first one."""
    undisturbed, moments, resumed = calm("mean"), 16, 0
    for moment in range(moments):
        broken = Broken(cuts((moment * undisturbed.seconds / (moments - 2), *pair)))
        broken.check_like(undisturbed)
        resumed += broken.resumed
    assert resumed >= moments


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_averaged(kind):
    undisturbed, resumed = calm(kind), 0
    size = len(undisturbed.modes)
    for seed in range(6):
        rng = random.Random(seed)
        broken = Broken(cuts((rng.uniform(0, undisturbed.seconds), *rng.sample(range(size), 2))), **KINDS[kind])
        broken.check_like(undisturbed)
        resumed += broken.resumed
    assert resumed > 0


@pytest.mark.parametrize("kind", ["mean", "one call each", "lossy codec", "verified"])
def test_several_cuts_in_one_round(kind):
    undisturbed, count = calm(kind), 5
    for seed in range(4):
        rng = random.Random(seed)
        moments = [(rng.uniform(0, 1.5 * undisturbed.seconds), *rng.sample(range(SIZE), 2)) for _ in range(count)]
        Broken(cuts(*moments), **KINDS[kind]).check_like(undisturbed, count * 0.5)


def test_over_long_links_all_connections_of_a_member_are_cut():
    """The cut is of all connections to it at one moment, as when its router starts anew."""
    link = Link(delay=0.1, jitter=0.01)
    undisturbed = Broken(link=link)
    for part in range(1, 9):
        moment = part * undisturbed.seconds / 8
        broken = Broken(cuts(*((moment, 1, other) for other in (0, 2, 3))), link=link)
        broken.check_like(undisturbed, 2.5)  # a handshake takes 0.6 s
