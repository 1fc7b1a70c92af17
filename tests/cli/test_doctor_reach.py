"""``shoal doctor`` about relays and about how others reach this machine, with causes that are really there."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import Token
from shoal.cli.doctor.findings import Finding, Severity
from shoal.cli.doctor.reach import is_relay, look_at_reach, look_at_relay
from shoal.net.limits import RelayLimits
from shoal.p2p import P2P, Multiaddr
from shoal.reach.nat.port_mapping import MappingPolicy, PortMapping
from shoal.reach.nat.routers import Gateway, Lease, Mapper, NoMappingError
from tests.p2p.peers import Peers

pytestmark = pytest.mark.timeout(120)
PORT = 31337


async def examine_relay(**options: Any) -> dict[str, Finding]:
    async with Peers("tcp") as peers:
        relay, caller = await peers.start(**options), await peers.start(client_mode=True)
        [address] = relay.get_addresses(relay.peer_id)
        found = {each.check: each async for each in look_at_relay(caller, address, relay.peer_id, 0.01, None)}
        assert await is_relay(caller, relay.peer_id) is (found["relay"].values["code"] == 0)
        return found


async def test_a_relay_and_the_way_through_it() -> None:
    found = await examine_relay(relay=True)
    assert {each.verdict for each in found.values()} == {Severity.OK}, found
    assert found["relay"].text == "it takes reservations, up to 256 circuits, 50 Mbit/s for all together, 10.0 ms away"
    assert found["circuit"].text.startswith("this machine called itself through it: ready after ")
    assert found["circuit"].values["megabits"] > 1


async def test_a_relay_without_a_limit() -> None:
    found = await examine_relay(relay=True, relay_limits=RelayLimits(rate=None))
    assert "no limit to their rate" in found["relay"].text


async def test_a_peer_that_is_no_relay() -> None:
    found = await examine_relay(relay=False)
    assert list(found) == ["relay"]
    assert (found["relay"].verdict, found["relay"].text.partition(":")[0]) == (Severity.OK, "it is none")


async def test_a_relay_that_is_full() -> None:
    found = await examine_relay(relay=True, relay_limits=RelayLimits(reservations_per_host=0))
    assert list(found) == ["relay"]
    assert found["relay"].verdict is Severity.WARN
    assert found["relay"].text == "it is full: 0 reservations of one host"
    assert "shoal dht" in found["relay"].fix


async def test_a_relay_that_carries_nothing() -> None:
    found = await examine_relay(relay=True, relay_limits=RelayLimits(circuits=0))
    assert found["circuit"].verdict is Severity.FAIL
    assert "has no room" in found["circuit"].text
    assert found["circuit"].fix


async def test_a_token_for_one_identity_cannot_call_itself() -> None:
    async with Peers("tcp") as peers:
        relay, caller = await peers.start(relay=True), await peers.start(client_mode=True)
        [address] = relay.get_addresses(relay.peer_id)
        found = {each.check: each async for each in look_at_relay(caller, address, relay.peer_id, 0.01, "no token")}
    assert found["circuit"].verdict is Severity.UNKNOWN
    assert "second identity" in found["circuit"].text


async def test_a_peer_that_nobody_has_to_call() -> None:
    run = Token.new_run("friends")
    guest = run.invite(ROLES_BY_NAME["monitor"], int(time.time()) + 3600).text
    async with Peers("tcp") as peers:
        relay = await peers.start(relay=True, token=run.text)
        caller = await peers.start(client_mode=True, token=guest)
        [address] = relay.get_addresses(relay.peer_id)
        found = {each.check: each async for each in look_at_relay(caller, address, relay.peer_id, 0.01, guest)}
    assert list(found) == ["relay"]
    assert found["relay"].verdict is Severity.WARN
    assert found["relay"].text.startswith("it refuses: a peer that nobody has to call")


async def test_a_relay_that_has_gone() -> None:
    async with Peers("tcp") as peers:
        relay, caller = await peers.start(relay=True), await peers.start(client_mode=True)
        [address] = relay.get_addresses(relay.peer_id)
        await relay.shutdown()
        found = {each.check: each async for each in look_at_relay(caller, address, relay.peer_id, 0.01, None)}
    assert [(each.check, each.verdict) for each in found.values()] == [("relay", Severity.WARN)]


# --- this machine -----------------------------------------------------------------------------------------------------


async def reach_of(p2p: P2P) -> dict[str, Finding]:
    return {each.check: each async for each in look_at_reach(p2p, [])}


async def test_on_its_own() -> None:
    async with Peers("tcp") as peers:
        found = await reach_of(await peers.start())
        assert await reach_of(await peers.start(client_mode=True)) == {}
    assert list(found) == ["reachable", "NAT", "IPv6", "port mapping"]
    assert {each.verdict for each in found.values()} <= {Severity.OK, Severity.UNKNOWN}, found
    assert found["reachable"].verdict is Severity.UNKNOWN, "nobody was asked"
    assert "give the ADDRESS of a peer outside" in found["reachable"].text
    assert found["port mapping"].text.startswith("not needed")


async def test_which_ipv6_addresses_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Peers("tcp") as peers:
        p2p = await peers.start()
        for own, told in [
            (["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"], "no global address"),
            (["/ip6/fd00::2/tcp/1", "/ip6/::1/tcp/1"], "no global address (fd00::2: within this network only)"),
        ]:
            monkeypatch.setattr(p2p.transport, "addresses", lambda own=own: [Multiaddr(each) for each in own])
            assert (await reach_of(p2p))["IPv6"].text == told
        monkeypatch.undo()


class Answer(Mapper):
    """A router that says what a test wants."""

    name = "PCP"
    answer: Multiaddr | NoMappingError

    async def ask(self, seconds: int) -> Lease:
        if isinstance(self.answer, NoMappingError):
            raise self.answer
        return Lease(self.answer, 3600.0)

    async def has_forgotten(self) -> bool:
        return False

    async def release(self) -> None:
        return None


ANSWERS = {
    "granted": (Multiaddr("/ip4/8.8.4.4/tcp/5"), Severity.UNKNOWN, "nobody outside has tried it yet", ""),
    "double": (Multiaddr("/ip4/10.0.0.9/tcp/5"), Severity.WARN, "behind another router", "outer router"),
    "refused": (NoMappingError("it may not"), Severity.WARN, "the router refuses. PCP: it may not", "turn on UPnP"),
    "silent": (NoMappingError("silence", answered=False), Severity.WARN, "no answer. PCP: silence", "turn on UPnP"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_what_routers_say(name: str) -> None:
    answer, verdict, text, fix = ANSWERS[name]

    def make(gateway: Gateway, port: int) -> list[Mapper]:
        mapper = Answer(gateway, port)
        mapper.answer = answer
        return [mapper]

    gateway = Gateway("192.168.1.1", "192.168.1.2")
    async with Peers("tcp") as peers:
        p2p = await peers.start()
        p2p.outlook.mapping = PortMapping(
            PORT, lambda addresses: None, pace=MappingPolicy(), find=lambda: [gateway], make_mappers=make
        )
        p2p.outlook.mapping.start()
        found = (await reach_of(p2p))["port mapping"]
    assert (found.verdict, text in found.text, fix in found.fix) == (verdict, True, True), found
