"""What macOS does differently, tried on any system; ``pytest --pretend=macos`` runs the rest of the tests as there."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from shoal.net import limits as p2p_limits
from shoal.net.own_addresses import LOOPBACK, PLUGGED, UNCONFIGURED, OwnAddress, OwnAddresses
from tests.net.test_tcp import pair, read
from tests.p2p.peers import end_of, until
from tests.pretend import system


class BrokenSocket:
    """Where the other side has reset the connection: no option can be set any more."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real

    def setsockopt(self, *_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


async def test_options_cannot_be_set_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (near, far):
        transport = far.transport
        real = transport.get_extra_info

        class Transport:
            def get_extra_info(self, name: str) -> object:
                return BrokenSocket(real(name)) if name == "socket" else real(name)

            def __getattr__(self, name: str) -> object:
                return getattr(transport, name)

        far.transport = Transport()
        reading = asyncio.ensure_future(read(far, 1))
        await asyncio.sleep(0)
        far.limit_backlog(2**13)
        reading.cancel()
        assert isinstance(await end_of(reading), asyncio.CancelledError)
        await until(lambda: near.closed)


def test_as_many_files_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells 256 and no upper limit, and allows 24,576."""
    limits = [256, -1]

    class Resource:
        RLIMIT_NOFILE, RLIM_INFINITY = 8, -1

        @staticmethod
        def getrlimit(_: int) -> tuple[int, int]:
            return limits[0], limits[1]

        @staticmethod
        def setrlimit(_: int, wanted: tuple[int, int]) -> None:
            if wanted[0] > 24_576:
                raise ValueError("current limit exceeds maximum limit")
            limits[:] = wanted

    monkeypatch.setattr(p2p_limits.importlib, "import_module", lambda _: Resource)
    p2p_limits.increase_file_limit()
    assert limits[1] == -1
    assert 0.9 * 24_576 < limits[0] <= 24_576


def test_addresses_that_nobody_has_configured_are_told_only_without_a_network() -> None:
    home, own, loopback = OwnAddress("192.0.2.7", PLUGGED), OwnAddress("169.254.1.2", UNCONFIGURED), "127.0.0.1"
    found = [home, own, OwnAddress(loopback, LOOPBACK)]
    addresses = OwnAddresses(lambda: found)
    addresses.look(0)
    assert [each.ip for each in addresses.told()] == ["192.0.2.7", loopback]
    alone = OwnAddresses(lambda: found[1:])
    alone.look(0)
    assert [each.ip for each in alone.told()] == ["169.254.1.2", loopback]


@pytest.mark.skipif(system != "macos", reason="only there may ports overlap")
async def test_a_port_that_somebody_has_on_one_network() -> None:
    from shoal.net.tcp.listener import bind

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            await bind("0.0.0.0", other.getsockname()[1], socket.AF_INET)
