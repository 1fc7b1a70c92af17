"""Keeping a port forwarded: which way is taken, renewal, routers that restart, refuse or change, and the end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from shoal.p2p import P2P, Multiaddr
from shoal.reach.nat.pcp import NatPmp, Pcp
from shoal.reach.nat.port_mapping import MappingPolicy, PortMapping, has_upnp
from shoal.reach.nat.routers import Gateway, Lease, Mapper, NoMappingError
from tests import pretend
from tests.p2p.peers import PATIENCE
from tests.reach.fake_routers import OUTER_IP, Igd, Router

pytestmark = pytest.mark.skipif(pretend.system == "windows", reason="the pretended loop has no datagrams")

PORT = 31337
OUTER = Multiaddr(f"/ip4/{OUTER_IP}/tcp/{PORT}")
SLOW = MappingPolicy(look=1e6, retry=1e6, tries=(PATIENCE,))
"""It does everything once."""
BUSY = MappingPolicy(look=0.0, retry=1e6, soonest=1e6, tries=(PATIENCE,))
"""It looks all the time, and is never due to renew."""


class Owner:
    """Has a mapping, and waits for what it is told."""

    def __init__(self) -> None:
        self.told: list[list[Multiaddr]] = []
        self._news = asyncio.Event()

    def on_address(self, addresses: list[Multiaddr]) -> None:
        self.told.append(addresses)
        self._news.set()

    async def until(self, *expected: list[Multiaddr]) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.told[-len(expected) :] != list(expected):
                self._news.clear()
                await self._news.wait()


def mappers(pace: MappingPolicy) -> Callable[[Gateway, int], Sequence[Mapper]]:
    return lambda gateway, port: [Pcp(gateway, port, pace.tries), NatPmp(gateway, port, pace.tries)]


@asynccontextmanager
async def mapping_of(
    owner: Owner, gateways: list[Gateway], pace: MappingPolicy = SLOW, **options: object
) -> AsyncIterator[PortMapping]:
    options.setdefault("make_mappers", mappers(pace))
    mapping = PortMapping(PORT, owner.on_address, pace=pace, find=lambda: list(gateways), **options)  # type: ignore[arg-type]
    mapping.start()
    try:
        yield mapping
    finally:
        await mapping.close()


async def until(condition: Callable[[], bool], came: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            came.clear()
            await came.wait()


async def test_pcp_comes_first_and_the_port_is_given_back() -> None:
    owner = Owner()
    async with Router() as router:
        async with mapping_of(owner, [router.gateway]) as mapping:
            await mapping.wait_for_first_try()
            assert mapping.addresses == [OUTER]
            assert owner.told == [[OUTER]]
            assert mapping.verdicts == {"PCP": f"forwards {OUTER}"}
            assert not mapping.is_refused
        assert router.asked() == ["PCP map", "PCP map 0"]
        assert not router.mappings
        assert owner.told == [[OUTER]]  # of the end, which it has begun itself, it is not told


async def test_nat_pmp_comes_second() -> None:
    owner = Owner()
    async with Router() as router:
        router.versions = (0,)
        async with mapping_of(owner, [router.gateway]) as mapping:
            await owner.until([OUTER])
            assert mapping.verdicts == {
                "PCP": "the router speaks version 0 and not PCP",
                "NAT-PMP": f"forwards {OUTER}",
            }
        assert router.asked() == ["PCP map", "NAT-PMP address", "NAT-PMP map", "NAT-PMP map 0"]


async def test_upnp_comes_last() -> None:
    pytest.importorskip("async_upnp_client")
    assert has_upnp()
    owner = Owner()
    async with Igd() as router:
        quick = replace(SLOW, tries=(0.01,))
        async with mapping_of(owner, [router.gateway], quick, make_mappers=None) as mapping:
            await owner.until([OUTER])
            assert list(mapping.verdicts) == ["PCP", "NAT-PMP", "UPnP"]
            assert list(router.mappings) == [PORT]
        assert not router.mappings


async def test_what_speaks_upnp_is_loaded_only_if_a_router_answers() -> None:
    program = (
        "import asyncio, sys\n"
        "from shoal.reach.nat.routers import Gateway, NoMappingError\n"
        "from shoal.reach.nat.upnp_search import UpnpIfFound\n"
        "async def main():\n"
        "    try:\n"
        "        await UpnpIfFound(Gateway('127.0.0.1', '127.0.0.1', ssdp_port=9), 1).ask(60)\n"
        "    except NoMappingError:\n"
        "        print('async_upnp_client' in sys.modules or 'aiohttp' in sys.modules)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert said.split() == [b"False"]


async def test_a_router_that_refuses_is_left_alone() -> None:
    owner = Owner()
    async with Router() as router:
        router.result = 2
        async with mapping_of(owner, [router.gateway], replace(BUSY, look=0.001)) as mapping:
            await mapping.wait_for_first_try()
            for _ in range(20):
                mapping.look_again()
                await asyncio.sleep(0)
            assert mapping.is_refused
            assert mapping.addresses == owner.told == []
            assert set(mapping.verdicts) == {"PCP", "NAT-PMP"}
        assert router.asked() == ["PCP map", "NAT-PMP address"]


async def test_after_a_while_a_router_that_refused_is_asked_again() -> None:
    owner = Owner()
    async with Router() as router:
        router.result, router.pause = 2, 0
        pace = replace(BUSY, retry=0.001)
        async with mapping_of(owner, [router.gateway], pace) as mapping:
            await until(lambda: router.asked().count("PCP map") > 1, router.came)
            assert mapping.is_refused
            router.result = 0
            await owner.until([OUTER])


async def test_leases_are_renewed_at_half_time_or_end() -> None:
    owner = Owner()
    async with Router() as router:
        router.lifetime = 1
        pace = MappingPolicy(look=1e6, retry=1e6, soonest=0.01, tries=(PATIENCE,))
        async with mapping_of(owner, [router.gateway], pace):
            await until(lambda: router.asked().count("PCP map") >= 2, router.came)
            router.result = 8
            await owner.until([OUTER], [])
        assert owner.told == [[OUTER], []]
        assert router.asked()[-1] == "PCP map"  # what has ended need not be given back


async def test_a_restarted_router_is_asked_anew() -> None:
    owner = Owner()
    async with Router() as router, mapping_of(owner, [router.gateway], BUSY):
        await owner.until([OUTER])
        await until(lambda: "PCP announce" in router.asked(), router.came)
        router.mappings.clear()
        router.epoch = 0
        router.outer_ip = "198.51.100.8"
        await owner.until([Multiaddr(f"/ip4/198.51.100.8/tcp/{PORT}")])
        assert list(router.mappings) == [PORT]


async def test_a_router_that_has_restarted_and_refuses_now() -> None:
    owner = Owner()
    async with Router() as router, mapping_of(owner, [router.gateway], BUSY) as mapping:
        await owner.until([OUTER])
        router.epoch, router.result = 0, 2
        await owner.until([OUTER], [])
        assert mapping.addresses == []


async def test_a_router_that_is_silent_for_a_moment_keeps_its_lease() -> None:
    owner = Owner()
    async with Router() as router, mapping_of(owner, [router.gateway], replace(BUSY, tries=(0.01,))) as mapping:
        await owner.until([OUTER])
        asked = len(router.requests)
        router.lost = 10**6
        await until(lambda: len(router.requests) > asked + 2, router.came)
        assert mapping.addresses == [OUTER]


async def test_a_machine_that_moves_asks_its_new_router() -> None:
    owner = Owner()
    async with Router() as first, Router() as second:
        second.outer_ip = "198.51.100.8"
        gateways = [first.gateway]
        async with mapping_of(owner, gateways) as mapping:
            await owner.until([OUTER])
            gateways[:] = [second.gateway]
            mapping.look_again()
            await owner.until([], [Multiaddr(f"/ip4/198.51.100.8/tcp/{PORT}")])
            gateways.clear()
            mapping.look_again()
            await owner.until([])
        assert second.asked() == ["PCP map"]


async def test_a_look_at_once_renews() -> None:
    owner = Owner()
    async with Router() as router, mapping_of(owner, [router.gateway]) as mapping:
        await owner.until([OUTER])
        mapping.look_again()
        await until(lambda: router.asked().count("PCP map") == 2, router.came)


async def test_only_where_the_peer_listens() -> None:
    owner = Owner()
    async with (
        Router() as router,
        mapping_of(owner, [router.gateway], listens_at=lambda ip: ip == "10.0.0.1") as mapping,
    ):
        await mapping.wait_for_first_try()
        assert not router.requests
        assert not mapping.verdicts


async def test_a_hole_in_the_firewall_of_ipv6() -> None:
    class Hole(Mapper):
        name = "PCP"

        async def ask(self, seconds: int) -> Lease:
            return Lease(Multiaddr(f"/ip6/2001:db8::2/tcp/{self.port}"), 3600.0)

        async def has_forgotten(self) -> bool:
            return False

        async def release(self) -> None:
            raise NoMappingError("it does not answer")

    def make(gateway: Gateway, port: int) -> list[Mapper]:
        return [Hole(gateway, port)] if gateway.is_ipv6 else [Pcp(gateway, port, SLOW.tries)]

    owner = Owner()
    async with Router() as router:
        gateways = [router.gateway, Gateway("fe80::1%eth0", "2001:db8::2")]
        async with mapping_of(owner, gateways, make_mappers=make) as mapping:
            await mapping.wait_for_first_try()
            assert mapping.addresses == [OUTER, Multiaddr(f"/ip6/2001:db8::2/tcp/{PORT}")]
            assert list(mapping.verdicts) == ["PCP", "PCP, IPv6"]


async def test_a_fault_is_logged_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    faults = [ValueError("a fault")]

    def make(gateway: Gateway, port: int) -> Sequence[Mapper]:
        if faults:
            raise faults.pop()
        return [Pcp(gateway, port, SLOW.tries)]

    owner = Owner()
    async with Router() as router:
        with caplog.at_level(logging.ERROR):
            async with mapping_of(owner, [router.gateway], replace(SLOW, retry=0.0), make_mappers=make):
                await owner.until([OUTER])
    assert "keeping a port of the router has failed" in caplog.text


async def test_closing_does_not_wait_for_a_silent_router() -> None:
    owner = Owner()
    pace = replace(SLOW, farewell=0.01)
    async with Router() as router:
        async with mapping_of(owner, [router.gateway], pace):
            await owner.until([OUTER])
            router.lost = 10**6
        assert "PCP map 0" in router.asked() or len(router.requests) == 1
        unused = PortMapping(PORT, owner.on_address)
        await unused.close()


async def test_a_peer_of_one_machine_needs_no_router() -> None:
    for options in ({}, {"nat_port_map": False}, {"client_mode": True}):
        p2p = await P2P.create(**options)
        assert p2p.outlook.mapping is None
        await p2p.shutdown()
