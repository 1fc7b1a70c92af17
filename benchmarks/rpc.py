"""How fast calls and streams between two processes are: small unary calls, and bulk data on one TLS connection.

    python benchmarks/rpc.py
    python benchmarks/rpc.py --runs 11 --megabytes 2000

One process serves, this one calls, over loopback with TLS 1.3. Every value is the median of several runs. The bulk data
is received straight into the memory where it is wanted, and its bytes are checked once at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median

from shoal.base.reactor import Portal
from shoal.p2p import P2P, Call, Header, P2PContext, PeerID, ServicerBase

PIECE_BYTES = 512 * 1024
"""As in an all-reduce: one part of a vector."""
BUDGETS = {"one after another": None, "in parallel": 5_000, "to the server": 1.2, "from the server": 1.2}


class Number(Header):
    value: int


class Bench(ServicerBase):
    async def rpc_echo(self, request: Number, context: P2PContext) -> Number:
        return request

    async def rpc_take(self, call: Call, context: P2PContext) -> None:
        """Receive pieces and answer with the sum of the last one's bytes."""
        piece = memoryview(bytearray(PIECE_BYTES))
        while await call.receive(Number) is not None:
            await call.read_payload_into(piece)
        await call.send(Number(value=sum(piece)))

    async def rpc_give(self, call: Call, context: P2PContext) -> None:
        """Send as many pieces as asked for."""
        request = await call.receive(Number)
        assert request is not None
        piece = memoryview(bytes(range(256)) * (PIECE_BYTES // 256))
        for number in range(request.value):
            await call.send(Number(value=number), piece)


async def serve() -> tuple[P2P, str]:
    p2p = await P2P.create()
    await Bench().add_p2p_handlers(p2p)
    return p2p, str((await p2p.get_visible_maddrs())[0])


def server_process() -> None:
    portal = Portal("benchmark server")
    p2p, address = portal.call(serve())
    print(address, flush=True)
    sys.stdin.read()  # until the client is done
    portal.call(p2p.shutdown())
    portal.close(timeout=5)


class Client:
    def __init__(self, p2p: P2P, server: PeerID, megabytes: float) -> None:
        self.p2p = p2p
        self.stub = Bench.get_stub(p2p, server)
        self.pieces = max(1, int(megabytes * 1e6 / PIECE_BYTES))
        self.piece = memoryview(bytes(range(256)) * (PIECE_BYTES // 256))
        self.sum = sum(self.piece)

    async def _call(self, calls: int) -> None:
        for number in range(calls):
            response = await self.stub.rpc_echo(Number(value=number))
            assert response.value == number

    async def one_after_another(self, calls: int) -> float:
        """Calls per second of one caller that waits for each answer."""
        began = time.perf_counter()
        await self._call(calls)
        return calls / (time.perf_counter() - began)

    async def in_parallel(self, calls: int, callers: int) -> float:
        """Calls per second of several callers at once."""
        began = time.perf_counter()
        await asyncio.gather(*(self._call(calls // callers) for _ in range(callers)))
        return calls // callers * callers / (time.perf_counter() - began)

    async def to_the_server(self) -> float:
        """Gigabytes per second sent on one connection."""
        began = time.perf_counter()
        async with self.stub.rpc_take() as call:
            for number in range(self.pieces):
                await call.send(Number(value=number), self.piece)
            await call.send_end()
            answer = await call.receive(Number)
            assert answer is not None
            assert answer.value == self.sum
            assert await call.receive(Number) is None
        return self.pieces * PIECE_BYTES / (time.perf_counter() - began) / 1e9

    async def from_the_server(self) -> float:
        """Gigabytes per second received on one connection."""
        target = memoryview(bytearray(PIECE_BYTES))
        began = time.perf_counter()
        async with self.stub.rpc_give() as call:
            await call.send(Number(value=self.pieces), end=True)
            while await call.receive(Number) is not None:
                await call.read_payload_into(target)
        seconds = time.perf_counter() - began
        assert sum(target) == self.sum
        return self.pieces * PIECE_BYTES / seconds / 1e9


async def measure(address: str, args: argparse.Namespace) -> dict[str, list[float]]:
    p2p = await P2P.create(initial_peers=[address], client_mode=True)
    try:
        client = Client(p2p, PeerID.from_base58(address.rpartition("/")[2]), args.megabytes)
        measurements: dict[str, Callable[[], Awaitable[float]]] = {
            "one after another": lambda: client.one_after_another(args.calls),
            "in parallel": lambda: client.in_parallel(args.calls, args.callers),
            "to the server": client.to_the_server,
            "from the server": client.from_the_server,
        }
        results: dict[str, list[float]] = {name: [] for name in measurements}
        for run in range(-1, args.runs):  # the first run warms up
            for name, take in measurements.items():
                value = await take()
                if run >= 0:
                    results[name].append(value)
        return results
    finally:
        await p2p.shutdown()


def report(results: dict[str, list[float]], args: argparse.Namespace) -> None:
    print(f"two processes, TLS 1.3 over loopback, median of {args.runs} runs")
    for name, values in results.items():
        bulk = "server" in name
        title = f"one stream {name}, GB/s" if bulk else f"unary calls {name}, per second"
        runs = " ".join(f"{value:.2f}" if bulk else f"{value:.0f}" for value in values)
        budget = "" if BUDGETS[name] is None else f"budget {BUDGETS[name]:g}"
        print(f"  {title:<44} {median(values):9.2f}   {budget:<12} runs {runs}")
    print(json.dumps({name: median(values) for name, values in results.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5_000, help="unary calls per run")
    parser.add_argument("--callers", type=int, default=32, help="how many of them are under way at a time")
    parser.add_argument("--megabytes", type=float, default=1_000, help="bulk data per run and direction")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        server_process()
        return
    with subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        portal = Portal("benchmark client")
        try:
            results = portal.call(measure(server.stdout.readline().strip(), args))
        finally:
            portal.close(timeout=5)
            server.communicate("done", timeout=10)
    report(results, args)


if __name__ == "__main__":
    main()
