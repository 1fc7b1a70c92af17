"""A peer that does what it is told, one JSON line each, and says what came of it: mostly, it calls others.

The first line has the parameters of its ``DHT``. Every other one has a number, a command and its arguments.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal import DHT
from shoal.dht import DHTNode
from shoal.p2p import P2P, Call, Header, Multiaddr, P2PContext, PeerID, ServicerBase
from shoal.reach.manager import ReachabilityManager
from shoal.reach.reachability import Reachability

PIECE_BYTES = 16 * 1024
CALLABLE_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.005


class Number(Header):
    value: int


class Probe(ServicerBase):
    """What peers call at each other."""

    async def rpc_echo(self, request: Number, context: P2PContext) -> Number:
        return request

    async def rpc_take(self, call: Call, context: P2PContext) -> None:
        """Count what arrives between two moments, which are told first, in milliseconds."""
        begin, end = [(await _next(call)).value / 1000 for _ in range(2)]
        piece, total = memoryview(bytearray(PIECE_BYTES)), 0
        while time.monotonic() < end:
            await _next(call)
            await call.read_payload_into(piece)
            if begin <= time.monotonic() < end:
                total += len(piece)
        await call.send(Number(value=total))


async def _next(call: Call) -> Number:
    number = await call.receive(Number)
    assert number is not None
    return number


class Milestones:
    """When this peer had its first connection, and when others could call it first through a relay.

    It notes that inside of the peer, which is on its way before anybody can look at it.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}
        self._note_after(P2P, "greet", "connected", lambda p2p: True)
        self._note_after(
            ReachabilityManager, "update", "relayed", lambda outlook: outlook.state is Reachability.RELAYED
        )

    def _note_after(self, kind: type, method: str, name: str, is_so: Callable[[Any], bool]) -> None:
        original = getattr(kind, method)

        @functools.wraps(original)
        def noting(this: Any, *arguments: Any, **options: Any) -> Any:
            result = original(this, *arguments, **options)
            if name not in self.seconds and is_so(this):
                self.seconds[name] = time.monotonic() - self._began
            return result

        setattr(kind, method, noting)


class Commands:
    """What can be asked of this peer; all run in the background loop."""

    def __init__(self, p2p: P2P, milestones: Milestones) -> None:
        self.p2p, self._milestones = p2p, milestones

    async def milestones(self) -> dict[str, float]:
        """Seconds since this peer has begun to start: see :class:`Milestones`."""
        return self._milestones.seconds

    async def look(self) -> dict[str, Any]:
        """How others call this peer."""
        p2p = self.p2p
        return {
            "reachability": p2p.reachability.value,
            "addresses": [str(address) for address in await p2p.get_visible_maddrs(latest=True)],
            "reservations": p2p.metrics.reservations,
            "nat": p2p.metrics.nat,
        }

    async def mapping(self) -> dict[str, str]:
        """What has become of each way to ask the router for a port."""
        mapping = self.p2p.outlook.mapping
        if mapping is None:
            return {}
        await mapping.wait_for_first_try()
        return mapping.verdicts

    async def wait_until(self, reachability: str, seconds: float = CALLABLE_LIMIT_SECONDS) -> float:
        """Wait for this state; returns how long that took."""
        began = time.monotonic()
        while self.p2p.reachability.value != reachability:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{self.p2p.reachability.value} after {seconds:g} s, not {reachability}")
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    async def wait_for_reservations(self, count: int, seconds: float = CALLABLE_LIMIT_SECONDS) -> float:
        """Wait until this many relays are held; returns how long that took."""
        began = time.monotonic()
        while len(self.p2p.reservations.held) < count:
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"{len(self.p2p.reservations.held)} reservations after {seconds:g} s, not {count}")
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    async def know(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember where a peer is."""
        self.p2p.address_book.replace(PeerID.from_base58(peer), [Multiaddr(address) for address in addresses])

    async def dial(self, peer: str, addresses: Sequence[str], count: int = 1) -> dict[str, Any]:
        """New connections to a peer: how long the last of them took, how they came about, and where they lead."""
        target = PeerID.from_base58(peer)
        self.forget(target)
        self.p2p.address_book.replace(target, [Multiaddr(address) for address in addresses])
        before = self._dials()
        began = time.monotonic()
        if count == 1:
            connections = [await self.p2p.dial(target)]
        else:
            [circuit, *_] = self.p2p.dialler.circuits(target)
            connections = [self.p2p.greet(each) for each in await self.p2p.circuits.dial(circuit, target, count)]
        seconds = time.monotonic() - began
        how = [name for name, number in self._dials().items() if number > before[name]]
        streams = [connection.stream for connection in connections]
        pool, on_circuit = self.p2p.pool, self.p2p.pool.on_circuit
        pool.on_circuit = lambda peer: None  # no spare ones, which would go on beside the next dial
        for connection in connections:
            pool.add(connection)
        pool.on_circuit = on_circuit
        await Probe.get_stub(self.p2p, target).rpc_echo(Number(value=1))
        self.forget(target)
        return {
            "seconds": seconds,
            "relayed": [stream.is_relayed for stream in streams],
            "at": [str(stream.remote_address) for stream in streams],
            "how": how,
        }

    def forget(self, target: PeerID) -> None:
        """Cut all connections to that peer."""
        self.p2p.pool.cut(lambda stream: stream.remote == target)

    def _dials(self) -> dict[str, int]:
        metrics = self.p2p.metrics
        return {
            "reversed": metrics.dials_reversed,
            "punched": metrics.dials_punched,
            "relayed": metrics.dials_relayed,
        }

    async def forget_punches(self) -> None:
        """As if this machine had come into another network."""
        self.p2p.outlook.forget_routers()

    async def metrics(self) -> dict[str, float]:
        """The counters that are plain numbers."""
        return {name: value for name, value in vars(self.p2p.metrics).items() if isinstance(value, int | float)}

    async def echo(self, peer: str, count: int) -> list[float]:
        """Seconds that small calls take, one after another."""
        stub, taken = Probe.get_stub(self.p2p, PeerID.from_base58(peer)), []
        for _ in range(count):
            began = time.monotonic()
            await stub.rpc_echo(Number(value=1))
            taken.append(time.monotonic() - began)
        return taken

    async def pour(self, peers: Sequence[str], begin: float, end: float) -> list[float]:
        """Send as much as possible on several connections at once; returns bytes per second of each, as received.

        Args:
            peers: for each connection, who receives.
            begin, end: of the monotonic clock, which all processes share: what comes between them counts.
        """
        received = await asyncio.gather(*(self._pour(PeerID.from_base58(peer), begin, end) for peer in peers))
        return [each / (end - begin) for each in received]

    async def _pour(self, target: PeerID, begin: float, end: float) -> int:
        piece = memoryview(bytes(PIECE_BYTES))
        async with Probe.get_stub(self.p2p, target).rpc_take() as call:
            for moment in (begin, end):
                await call.send(Number(value=round(moment * 1000)))
            answering = asyncio.ensure_future(call.receive(Number))
            while not answering.done():
                await call.send(Number(value=0), piece)
            answer = await answering
            assert answer is not None
            return answer.value


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    parameters = json.loads(sys.stdin.readline())
    milestones = Milestones()
    began = time.monotonic()
    dht = DHT(start=True, **parameters)

    async def prepare(dht: DHT, node: DHTNode) -> Commands:
        await Probe().add_p2p_handlers(node.p2p)
        return Commands(node.p2p, milestones)

    started = time.monotonic() - began
    commands = dht.run_coroutine(prepare)
    say(started=started, peer_id=str(dht.peer_id), **dht.run_coroutine(lambda dht, node: commands.look()))
    for line in sys.stdin:
        number, command, *arguments = json.loads(line)
        if command == "leave":
            break

        async def obey(dht: DHT, node: DHTNode, command: str = command, words: list[Any] = arguments) -> Any:
            return await getattr(commands, command)(*words)

        try:
            say(number=number, result=dht.run_coroutine(obey))
        except Exception as e:
            say(number=number, error=f"{type(e).__name__}: {e}")
    dht.shutdown()


if __name__ == "__main__":
    main()
