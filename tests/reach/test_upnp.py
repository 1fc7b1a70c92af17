"""UPnP: a port asked for, renewed and given back; routers that refuse, lie, or send the peer elsewhere."""

from __future__ import annotations

import pytest

from shoal.p2p import Multiaddr
from shoal.reach.nat.routers import Gateway, NoMappingError
from tests import pretend

pytest.importorskip("async_upnp_client")

from shoal.reach.nat.upnp import MAX_ANSWER_BYTES, Upnp
from shoal.reach.nat.upnp_search import find_description, is_of_host, location_in
from tests.reach.fake_routers import LOOPBACK, OUTER_IP, Igd

pytestmark = pytest.mark.skipif(pretend.system == "windows", reason="the pretended loop has no datagrams")

PORT = 31337
PATIENCE = 20.0


def asker(router: Igd) -> Upnp:
    return Upnp(router.gateway, PORT, search_seconds=PATIENCE)


async def test_a_port_is_asked_for_renewed_and_given_back() -> None:
    async with Igd() as router:
        mapper = asker(router)
        for _ in range(2):
            lease = await mapper.ask(3600)
            assert lease.address == Multiaddr(f"/ip4/{OUTER_IP}/tcp/{PORT}")
            assert lease.seconds == 3600
        given = router.mappings[PORT]
        assert (given["NewInternalClient"], given["NewInternalPort"]) == (LOOPBACK, str(PORT))
        assert (given["NewLeaseDuration"], given["NewProtocol"], given["NewRemoteHost"]) == ("3600", "TCP", "")
        assert router.fetched.count("/device.xml") == 1
        assert not await mapper.has_forgotten()
        await mapper.release()
        assert not router.mappings


async def test_a_port_of_another_machine_is_left_alone() -> None:
    async with Igd() as router:
        router.taken = {PORT}
        mapper = asker(router)
        address = (await mapper.ask(3600)).address
        assert address != Multiaddr(f"/ip4/{OUTER_IP}/tcp/{PORT}")
        assert [str(port) for port in router.mappings] == [address["tcp"]]
        assert (await mapper.ask(3600)).address == address
        router.taken = set(range(2**16))
        with pytest.raises(NoMappingError, match="ports belong to other machines"):
            await mapper.ask(3600)


async def test_a_router_that_knows_no_end_of_a_mapping() -> None:
    async with Igd() as router:
        router.only_permanent = True
        assert (await asker(router).ask(3600)).seconds == 3600
        assert router.mappings[PORT]["NewLeaseDuration"] == "0"


async def test_a_restarted_router_is_noticed() -> None:
    async with Igd() as router:
        mapper = asker(router)
        await mapper.ask(3600)
        router.mappings.clear()
        assert await mapper.has_forgotten()
        await mapper.ask(3600)
        router.outer_ip = "198.51.100.8"
        assert await mapper.has_forgotten()


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        ("AddPortMapping", 606, "it does not allow it"),
        ("AddPortMapping", 728, "no room"),
        ("AddPortMapping", 799, "799 no"),
        ("GetExternalIPAddress", 501, "it failed"),
    ],
)
async def test_refusals_say_why(action: str, code: int, text: str) -> None:
    async with Igd() as router:
        router.errors[action] = code
        with pytest.raises(NoMappingError, match=f"the router refuses: .*{text}") as caught:
            await asker(router).ask(3600)
        assert caught.value.answered
        assert not router.mappings


async def test_a_port_that_was_taken_away_cannot_be_given_back() -> None:
    async with Igd() as router:
        mapper = asker(router)
        await mapper.ask(3600)
        router.mappings.clear()
        with pytest.raises(NoMappingError, match="714"):
            await mapper.release()


@pytest.mark.parametrize("ip", ["", "0.0.0.0", "nonsense"])
async def test_a_router_without_an_outer_address_is_not_asked_for_a_port(ip: str) -> None:
    async with Igd() as router:
        router.outer_ip = ip
        with pytest.raises(NoMappingError, match="outer address"):
            await asker(router).ask(3600)
        assert not router.mappings


async def test_no_answer_to_the_search() -> None:
    async with Igd() as router:
        router.answers_searches = False
        with pytest.raises(NoMappingError, match="does not answer") as caught:
            await Upnp(router.gateway, PORT, search_seconds=0.02).ask(3600)
        assert not caught.value.answered


async def test_a_router_that_went_away_is_searched_for_again() -> None:
    async with Igd() as router:
        mapper = asker(router)
        await mapper.ask(3600)
        await router.stop_serving()
        for call in (mapper.has_forgotten, lambda: mapper.ask(3600), lambda: mapper.ask(3600)):
            with pytest.raises(NoMappingError):
                await call()
        assert router.searches > 2


@pytest.mark.parametrize(
    "location",
    [
        "http://192.0.2.1:1900/device.xml",
        "https://127.0.0.1/device.xml",
        "file:///etc/passwd",
        "http://[",
        "http://a@b",
    ],
)
async def test_what_leads_elsewhere_is_no_answer(location: str) -> None:
    assert not is_of_host(location, LOOPBACK)
    async with Igd() as router:
        router.location = location
        with pytest.raises(NoMappingError, match="does not answer"):
            await find_description(router.gateway, 0.02)
        assert not router.fetched


async def test_an_answer_from_another_machine_does_not_count() -> None:
    async with Igd() as router:
        elsewhere = Gateway("127.0.0.2", LOOPBACK, ssdp_port=router.gateway.ssdp_port)
        with pytest.raises(NoMappingError, match="does not answer"):
            await find_description(elsewhere, 0.02)


async def test_nothing_is_fetched_from_where_a_description_sends_to() -> None:
    async with Igd() as router, Igd() as other:
        router.control = f"http://localhost:{other.port}/control"
        with pytest.raises(NoMappingError, match="forwards no ports"):
            await asker(router).ask(3600)
        assert not other.fetched


DESCRIPTIONS = {
    "nothing": "",
    "no xml": "hello",
    "bomb": '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><root>&b;</root>',
    "no device": '<root xmlns="urn:schemas-upnp-org:device-1-0"></root>',
    "too long": "<root>" + " " * MAX_ANSWER_BYTES + "</root>",
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
async def test_descriptions_of_no_use(name: str) -> None:
    async with Igd() as router:
        router.description = DESCRIPTIONS[name]
        with pytest.raises(NoMappingError, match="description of itself is of no use"):
            await asker(router).ask(3600)


async def test_a_router_that_forwards_no_ports() -> None:
    async with Igd() as router:
        router.service = "urn:schemas-upnp-org:service:Layer3Forwarding:1"
        with pytest.raises(NoMappingError, match="forwards no ports"):
            await asker(router).ask(3600)


def test_answers_to_a_search() -> None:
    assert location_in(b"HTTP/1.1 200 OK\r\nlocation:  http://a/b \r\n\r\n") == "http://a/b"
    for answer in (b"", b"NOTIFY * HTTP/1.1\r\nLOCATION: http://a\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"\xff" * 99):
        assert not location_in(answer)
