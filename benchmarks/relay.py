"""How fast a relay copies: two sessions that it joins, over loopback, what one side sends arriving at the other.

    python benchmarks/relay.py
    python benchmarks/relay.py --circuits 8 --megabytes 500

The relay is a process of its own. What counts is its processor time, which hardly depends on what else this machine
does; the two ends are plain sockets in threads of this process. The bytes are checked by their sum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from statistics import median

from shoal.base.reactor import Portal
from shoal.net.tcp.sessions import SESSION_BYTE
from shoal.net.tcp.transport import TcpTransport
from shoal.net.transport import COOKIE_BYTES, Splice, Throttle
from shoal.p2p import Identity, Multiaddr

PIECE_BYTES = 2**18
IDLE_SECONDS = 120.0
BUDGETS = {"per processor second": 1.0, "on the clock": 0.4}
"""In GB."""


class NoLimit(Throttle):
    def take(self, nbytes: int) -> float:
        return 0.0


class Relay:
    """Joins as many pairs of sessions as it is asked for."""

    def __init__(self) -> None:
        self.transport = TcpTransport(Identity.generate())
        self._joining: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        [address] = await self.transport.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"), lambda stream: stream.abort())
        return int(address["tcp"] or 0)

    async def offer(self) -> list[str]:
        """Two cookies, whose sessions will be joined."""
        cookies = [os.urandom(COOKIE_BYTES) for _ in range(2)]
        expected = [self.transport.expect_session(cookie) for cookie in cookies]

        async def join() -> None:
            first, second = [await each for each in expected]
            await Splice(first, second, NoLimit(), IDLE_SECONDS).run()

        joining = asyncio.ensure_future(join())
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)
        return [cookie.hex() for cookie in cookies]

    async def close(self) -> None:
        for joining in self._joining:
            joining.cancel()
        await self.transport.close()


def relay_process() -> None:
    portal = Portal("benchmark relay")
    relay = Relay()
    print(json.dumps(portal.call(relay.listen())), flush=True)
    for line in sys.stdin:
        answer = portal.call(relay.offer()) if line.strip() == "offer" else time.process_time()
        print(json.dumps(answer), flush=True)
    portal.call(relay.close())
    portal.close(timeout=5)


class Copying:
    """The relay's process, and this side's ends of the pairs.

    Args:
        circuits: pairs of sessions that move at the same time.
    """

    def __init__(self, circuits: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--relay"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._port = int(self._answer())
        self.pairs = [[self._open(cookie) for cookie in self._ask("offer")] for _ in range(circuits)]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _ask(self, question: str) -> list[str]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        return answer if isinstance(answer, list) else [answer]

    def _open(self, cookie: str) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(SESSION_BYTE + bytes.fromhex(cookie))
        return connection

    def run(self, megabytes: float) -> tuple[float, float]:
        """Gigabytes per second of the relay's processor time, and on the clock."""
        pieces = max(1, round(megabytes * 1e6 / PIECE_BYTES / len(self.pairs)))
        sums: list[int] = []
        work = [threading.Thread(target=_send, args=(near, pieces)) for near, _ in self.pairs]
        work += [threading.Thread(target=_receive, args=(far, pieces, sums)) for _, far in self.pairs]
        spent, began = float(self._ask("time")[0]), time.perf_counter()
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        seconds = time.perf_counter() - began
        spent = float(self._ask("time")[0]) - spent
        assert sums == [sum(bytes(range(256))) * (PIECE_BYTES // 256)] * len(self.pairs), "other bytes than were sent"
        gigabytes = pieces * PIECE_BYTES * len(self.pairs) / 1e9
        return gigabytes / spent, gigabytes / seconds

    def close(self) -> None:
        for connection in (each for pair in self.pairs for each in pair):
            connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


def _send(connection: socket.socket, pieces: int) -> None:
    piece = bytes(range(256)) * (PIECE_BYTES // 256)
    for _ in range(pieces):
        connection.sendall(piece)


def _receive(connection: socket.socket, pieces: int, sums: list[int]) -> None:
    """Receive everything; the sum of the last piece is noted."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    for _ in range(pieces):
        filled = 0
        while filled < PIECE_BYTES:
            taken = connection.recv_into(buffer[filled:])
            if not taken:
                raise ConnectionError("the relay closed the connection")
            filled += taken
    sums.append(sum(buffer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--circuits", type=int, default=1, help="pairs of sessions that move at the same time")
    parser.add_argument("--megabytes", type=float, default=2000.0, help="of one run, all pairs together")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if args.relay:
        relay_process()
        return
    copying = Copying(args.circuits)
    try:
        copying.run(args.megabytes / 10)  # warms up
        measured = [copying.run(args.megabytes) for _ in range(args.runs)]
    finally:
        copying.close()
    results = dict(zip(BUDGETS, (median(values) for values in zip(*measured, strict=True)), strict=True))
    for name, value in results.items():
        print(f"{name:22}{value:6.2f} GB/s   at least {BUDGETS[name]:g}")
    print(json.dumps({"circuits": args.circuits, "megabytes": args.megabytes, "runs": args.runs, **results}))


if __name__ == "__main__":
    main()
