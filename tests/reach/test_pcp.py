"""PCP and NAT-PMP: every answer that a router may give, lies, lost datagrams, and answers from somebody else."""

from __future__ import annotations

import asyncio
import struct

import pytest

from shoal.errors import ProtocolError
from shoal.p2p import Multiaddr
from shoal.reach.nat import pcp
from shoal.reach.nat.pcp import Epoch, NatPmp, OtherVersionError, Pcp, read_nat_pmp, read_pcp
from shoal.reach.nat.routers import Gateway, Mapper, NoMappingError
from tests import pretend
from tests.p2p.peers import PATIENCE
from tests.reach.fake_routers import OUTER_IP, Router

pytestmark = pytest.mark.skipif(pretend.system == "windows", reason="the pretended loop has no datagrams")

PORT = 31337
TRIES = (0.01, 0.01, PATIENCE)
QUICK = (0.01, 0.01, 0.01)
OUTER = Multiaddr(f"/ip4/{OUTER_IP}/tcp/{PORT}")
NONCE = b"twelve bytes"
PROTOCOLS = pytest.mark.parametrize("protocol", [Pcp, NatPmp])


def test_requests_are_those_of_the_standards() -> None:
    assert pcp.pcp_map("192.168.1.2", NONCE, PORT, 3600, 40000, "1.2.3.4") == bytes.fromhex(
        "0201000000000e1000000000000000000000ffffc0a80102"  # version, opcode, lifetime, own address
        f"{NONCE.hex()}060000007a699c4000000000000000000000ffff01020304"
    )
    assert pcp.pcp_map("fd00::2", NONCE, PORT, 0, 0)[8:24].hex() == "fd" + "00" * 14 + "02"
    assert pcp.pcp_map("fd00::2", NONCE, PORT, 0, 0)[-16:] == bytes(16)
    assert pcp.nat_pmp_map(PORT, 3600, 40000) == bytes.fromhex("000200007a699c4000000e10")
    assert pcp.nat_pmp_address() == b"\0\0"
    assert pcp.pcp_announce("10.0.0.1").hex() == "0200000000000000" + "00" * 10 + "ffff0a000001"


@PROTOCOLS
async def test_a_port_is_asked_for_renewed_and_given_back(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        mapper = protocol(router.gateway, PORT, TRIES)
        for _ in range(2):
            lease = await mapper.ask(3600)
            assert lease.address == OUTER
            assert lease.seconds == 3600
        assert set(router.mappings) == {PORT}
        assert not await mapper.has_forgotten()
        await mapper.release()
        assert not router.mappings
        assert router.asked()[-1] == f"{mapper.name} map 0"


async def test_another_outer_port_than_the_one_that_was_asked_for_is_asked_for_again() -> None:
    async with Router() as router:
        router.change = lambda answer: [answer[:42] + struct.pack(">H", 4321) + answer[44:]]
        mapper = Pcp(router.gateway, PORT, TRIES)
        for _ in range(2):
            assert (await mapper.ask(3600)).address == Multiaddr(f"/ip4/{OUTER_IP}/tcp/4321")
        assert router.requests[1][42:44] == struct.pack(">H", 4321)


async def test_after_a_crash_the_same_secret_renews_the_same_mapping() -> None:
    async with Router() as router:
        for secret in (b"s" * 32, b"s" * 32, b"other", None, None):
            await Pcp(router.gateway, PORT, TRIES, secret).ask(3600)
        nonces = [request[24:36] for request in router.requests]
        assert nonces[0] == nonces[1]
        assert len(set(nonces)) == 4


@PROTOCOLS
@pytest.mark.parametrize("result", [*range(1, 14), 200])
async def test_every_refusal_says_why(protocol: type[Pcp] | type[NatPmp], result: int) -> None:
    async with Router() as router:
        router.result = result
        with pytest.raises(NoMappingError) as caught:
            await protocol(router.gateway, PORT, TRIES).ask(3600)
        known = pcp.RESULTS if protocol is Pcp else pcp.OLD_RESULTS
        assert str(caught.value) == known.get(result, f"it refuses for reason {result}")
        assert caught.value.answered
        assert caught.value.pause == (30 if protocol is Pcp else 0)


@PROTOCOLS
async def test_the_other_version_is_recognised_by_the_first_answer(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        router.versions = (0,) if protocol is Pcp else (2,)
        with pytest.raises(OtherVersionError, match=r"speaks version \d and not"):
            await protocol(router.gateway, PORT, TRIES).ask(3600)
        assert len(router.requests) == 1


@PROTOCOLS
async def test_lost_datagrams_are_sent_again(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        router.lost = 2
        assert (await protocol(router.gateway, PORT, TRIES).ask(3600)).address == OUTER


@PROTOCOLS
async def test_a_silent_router_is_asked_three_times(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        router.lost = 100
        with pytest.raises(NoMappingError, match="does not answer") as caught:
            await protocol(router.gateway, PORT, QUICK).ask(3600)
        assert not caught.value.answered
        async with asyncio.timeout(PATIENCE):
            while len(router.requests) < 3:
                router.came.clear()
                await router.came.wait()
        assert len(set(router.requests)) == 1


@PROTOCOLS
async def test_a_router_that_does_not_listen_is_not_waited_for(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        gateway = router.gateway
    with pytest.raises(NoMappingError, match="the router cannot be asked") as caught:
        await protocol(gateway, PORT, (PATIENCE,)).ask(3600)
    assert not caught.value.answered


async def test_a_router_without_a_way_to_it() -> None:
    for ip, own_ip in [("2001:db8::1", "2001:db8::2"), ("255.255.255.255", ""), ("fe80::1%nowhere", "::1")]:
        with pytest.raises(NoMappingError, match="the router cannot be asked"):
            await Pcp(Gateway(ip, own_ip), PORT, QUICK).ask(3600)


def _with(answer: bytes, at: int, what: bytes) -> bytes:
    return answer[:at] + what + answer[at + len(what) :]


LIES = {
    "another nonce": lambda answer: _with(answer, 24, b"another none"),
    "another protocol": lambda answer: _with(answer, 36, b"\x11"),
    "another inner port": lambda answer: _with(answer, 40, b"\x00\x16"),
    "another operation": lambda answer: _with(answer, 1, b"\x82"),
    "a request": lambda answer: _with(answer, 1, b"\x01"),
    "cut off": lambda answer: answer[:40],
    "nearly nothing": lambda answer: answer[:3],
    "nothing": lambda answer: b"",
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_is_no_answer_is_ignored(lie: str) -> None:
    async with Router() as router:
        router.change = lambda answer: [LIES[lie](answer), answer]
        assert (await Pcp(router.gateway, PORT, (PATIENCE,)).ask(3600)).address == OUTER


OLD_LIES = {
    "another inner port": lambda answer: _with(answer, 8, b"\x00\x16") if len(answer) == 16 else answer[:9],
    "another operation": lambda answer: _with(answer, 1, b"\x81"),
    "cut off": lambda answer: answer[:10],
    "nothing": lambda answer: b"",
}


@pytest.mark.parametrize("lie", OLD_LIES)
async def test_what_is_no_answer_of_nat_pmp_is_ignored(lie: str) -> None:
    async with Router() as router:
        router.change = lambda answer: [OLD_LIES[lie](answer), answer]
        assert (await NatPmp(router.gateway, PORT, (PATIENCE,)).ask(3600)).address == OUTER


@PROTOCOLS
async def test_an_answer_from_somebody_else_does_not_count(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        true_answer = router.datagram_received

        def answer_twice(data: bytes, addr: tuple[str, int]) -> None:
            router.outer_ip = "198.51.100.66"
            router.send_from_elsewhere(router.answer_to(data), addr)
            router.outer_ip = OUTER_IP
            true_answer(data, addr)

        router.datagram_received = answer_twice  # type: ignore[method-assign]
        assert (await protocol(router.gateway, PORT, (PATIENCE,)).ask(3600)).address == OUTER


@PROTOCOLS
@pytest.mark.parametrize("ip", ["0.0.0.0", "224.0.0.1", "127.0.0.1", "169.254.1.1", "255.255.255.255"])
async def test_an_outer_address_where_nobody_can_be_called(protocol: type[Pcp] | type[NatPmp], ip: str) -> None:
    async with Router() as router:
        router.outer_ip = ip
        with pytest.raises(NoMappingError, match=f"nobody can be called: {ip}"):
            await protocol(router.gateway, PORT, TRIES).ask(3600)


@PROTOCOLS
async def test_a_port_for_no_time_is_none(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        router.lifetime = 0
        with pytest.raises(NoMappingError, match="for 0 seconds"):
            await protocol(router.gateway, PORT, TRIES).ask(3600)


@PROTOCOLS
async def test_a_restarted_router_is_noticed(protocol: type[Pcp] | type[NatPmp]) -> None:
    async with Router() as router:
        mapper: Mapper = protocol(router.gateway, PORT, TRIES)
        await mapper.ask(3600)
        assert not await mapper.has_forgotten()
        router.epoch = 3
        assert await mapper.has_forgotten()
        await mapper.ask(3600)
        assert not await mapper.has_forgotten()


async def test_another_outer_address_is_noticed() -> None:
    async with Router() as router:
        mapper = NatPmp(router.gateway, PORT, TRIES)
        await mapper.ask(3600)
        router.outer_ip = "198.51.100.8"
        assert await mapper.has_forgotten()


def test_epochs_by_the_rule_of_the_standard() -> None:
    steps = [(1000, 50.0, False), (1300, 350.0, False), (1299, 350.5, False), (1280, 351.0, True), (1580, 651.0, False)]
    steps += [
        (1590, 700.0, True),  # 49 seconds here, 10 there
        (1900, 701.0, True),  # 310 seconds there: this machine has slept
        (1902, 702.0, False),
    ]
    epoch = Epoch()
    for told, now, expected in steps:
        assert epoch.has_restarted(told, now) is expected, told


def test_short_and_strange_answers() -> None:
    head = struct.pack(">BBBBII12x", 2, 0x81, 0, 2, 1800, 5)
    with pytest.raises(NoMappingError, match="does not allow it: turn on PCP") as caught:
        read_pcp(head, NONCE, PORT)  # a refusal may leave out the rest
    assert caught.value.pause == 1800
    with pytest.raises(ProtocolError, match="without saying which"):
        read_pcp(head[:3] + b"\0" + head[4:], NONCE, PORT)
    assert read_pcp(struct.pack(">BBBBII12x", 2, 0x80, 0, 0, 0, 77)).epoch == 77
    assert read_nat_pmp(bytes.fromhex("0080000000000005c6336407")).ip == OUTER_IP
    with pytest.raises(ProtocolError):
        read_nat_pmp(bytes.fromhex("0081000000000005"), PORT)


async def test_a_request_that_is_cancelled_leaves_nothing_behind() -> None:
    async with Router() as router:
        router.lost = 100
        task = asyncio.create_task(Pcp(router.gateway, PORT, (PATIENCE,)).ask(3600))
        await router.came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
