"""Punches through routers of every kind, over real TCP: which pairs get direct connections, and how soon."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest

from tests.drills import mostly_drills
from tests.nat.laboratory import NEEDS_LABORATORY, Laboratory
from tests.nat.punchers import Punchers
from tests.nat.rules import Kind

pytestmark = [NEEDS_LABORATORY, pytest.mark.timeout(200)]

BEHIND = [kind for kind in Kind if kind is not Kind.PUBLIC]
HOPELESS = {
    (Kind.PORT_RESTRICTED, Kind.SYMMETRIC),
    (Kind.CGNAT, Kind.SYMMETRIC),
    (Kind.SYMMETRIC, Kind.SYMMETRIC),
}
"""Nobody can guess the port that a symmetric router takes, and the other one lets in no other."""


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


@pytest.mark.parametrize("rst", mostly_drills([False, True]), ids=["drop", "rst"])
@pytest.mark.parametrize(("first", "second"), [*combinations_with_replacement(BEHIND, 2)])
def test_pairs_of_routers(lab: Laboratory, first: Kind, second: Kind, rst: bool) -> None:
    dialler, target = lab.host(first, rst=rst), lab.host(second, rst=rst)
    with Punchers(lab.host("public"), dialler, target) as punchers:
        came = punchers.punch(2)
        print(first, second, rst, came)
        if (first, second) in HOPELESS:
            assert came.failed == 2
            assert punchers.dialler.metrics.punches_failed == {"no connection": 1}
        else:
            assert came.failed == 0
            assert all(address.startswith(f"/ip4/{target.outer}/") for address in came.remotes)


@pytest.mark.parametrize("late", [0.15, 0.6])
@pytest.mark.parametrize("rst", [False, True], ids=["drop", "rst"])
def test_sides_that_do_not_begin_at_the_same_time(lab: Laboratory, rst: bool, late: float) -> None:
    first, second = (lab.host(Kind.PORT_RESTRICTED, rst=rst) for _ in range(2))
    with Punchers(lab.host("public"), first, second) as punchers:
        assert punchers.punch(4, late=late).failed == 0


def test_two_hosts_behind_one_router_meet_in_their_own_network(lab: Laboratory) -> None:
    router = lab.router(Kind.PORT_RESTRICTED)
    first, second = router.host(), router.host()
    with Punchers(lab.host("public"), first, second) as punchers:
        came = punchers.punch()
        assert [address.split("/tcp/")[0] for address in came.remotes] == [f"/ip4/{second.address}"]


@pytest.mark.parametrize("kind", [Kind.PORT_RESTRICTED, Kind.SYMMETRIC])
def test_firewalls_of_ipv6_whatever_is_done_to_ipv4(lab: Laboratory, kind: Kind) -> None:
    first, second = (lab.host(kind, ipv6="firewalled") for _ in range(2))
    with Punchers(lab.host("public"), first, second) as punchers:
        came = punchers.punch(2)
        assert came.failed == 0
        if kind is Kind.SYMMETRIC:
            assert {address.split("/tcp/")[0] for address in came.remotes} == {f"/ip6/{second.address_6}"}


def test_eight_at_once_take_hardly_longer_than_one(lab: Laboratory) -> None:
    first, second = (lab.host(Kind.PORT_RESTRICTED) for _ in range(2))
    with Punchers(lab.host("public"), first, second) as punchers:
        one = [max(punchers.punch().seconds) for _ in range(5)]
        eight = [max(punchers.punch(8).seconds) for _ in range(5)]
        print(f"one: {sorted(one)}, eight: {sorted(eight)}")
        assert len(punchers.punch(8).seconds) == 8
        # Of the round trips of 60 ms: two for the sessions, one for the exchange, one and a half for the rest.
        assert statistics.median(one) < 2.0
        assert statistics.median(eight) < 2.0
