"""A proxy that speaks HTTP CONNECT and SOCKS5, for tests; as a program it serves until its standard input ends.

It writes what it is asked for, and can be told to behave like proxies that are hard to deal with.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import ipaddress
import json
import sys
from collections.abc import Callable, Mapping
from typing import Self


class SmallProxy:
    """Use it as ``async with SmallProxy() as proxy``; ``proxy.port`` is where it listens, on all networks.

    Args:
        names: what host names lead to.
        user, password: that it demands.
        ports: to which it connects; None: to all.
        piece: how many bytes of an answer it sends at a time.
        answer: what it says instead of any answer.
        on_request: called with the host and port that it is asked for.
    """

    def __init__(
        self,
        *,
        names: Mapping[str, str] | None = None,
        user: str = "",
        password: str = "",
        ports: set[int] | None = None,
        piece: int = 1000,
        answer: bytes | None = None,
        on_request: Callable[[str, int], object] = lambda host, port: None,
    ) -> None:
        self.names, self.user, self.password, self.ports = names or {}, user, password, ports
        self.piece, self.answer, self.on_request = piece, answer, on_request
        self.port = 0
        self.asked: list[tuple[str, int]] = []
        """Hosts and ports, as they were named."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._begin, "0.0.0.0", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve_and_close(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_and_close(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # either side has gone
        finally:
            await _close(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.readexactly(1)
        if self.answer is not None:
            await self._say(writer, self.answer)
            return
        serve = self._agree_by_socks if first == b"\x05" else self._agree_by_http
        there = await serve(first, reader, writer)
        if there is not None:
            try:
                await _splice(reader, writer, *there)
            finally:
                await _close(there[1])

    async def _say(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        for begin in range(0, len(answer), self.piece):
            writer.write(answer[begin : begin + self.piece])
            await writer.drain()
            await asyncio.sleep(0.001)

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.asked.append((host, port))
        self.on_request(host, port)
        return await asyncio.open_connection(self.names.get(host, host), port)

    async def _agree_by_http(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        request = (first + await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = request.split("\r\n", 1)[0].split(" ")
        host, _, port = target.rpartition(":")
        secret = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        if self.user and f"Proxy-Authorization: Basic {secret}\r\n" not in request:
            await self._say(writer, b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
        elif method != "CONNECT" or (self.ports is not None and int(port) not in self.ports):
            await self._say(writer, b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        else:
            try:
                there = await self._connect(host.strip("[]"), int(port))
            except OSError:
                await self._say(writer, b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
                return None
            await self._say(writer, b"HTTP/1.1 200 Connection established\r\nVia: a small proxy\r\n\r\n")
            return there
        return None

    async def _agree_by_socks(
        self, _: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        methods = await reader.readexactly((await reader.readexactly(1))[0])
        wanted = 2 if self.user else 0
        if wanted not in methods:
            await self._say(writer, b"\x05\xff")
            return None
        await self._say(writer, bytes([5, wanted]))
        if self.user:
            await reader.readexactly(1)
            user, password = [(await reader.readexactly((await reader.readexactly(1))[0])).decode() for _ in range(2)]
            is_right = (user, password) == (self.user, self.password)
            await self._say(writer, b"\x01\x00" if is_right else b"\x01\x01")
            if not is_right:
                return None
        kind = (await reader.readexactly(4))[3]
        if kind == 3:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        else:
            host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == 1 else 16)))
        port = int.from_bytes(await reader.readexactly(2), "big")
        nowhere = b"\x01" + bytes(6)
        if self.ports is not None and port not in self.ports:
            await self._say(writer, b"\x05\x02\x00" + nowhere)
            return None
        try:
            there = await self._connect(host, port)
        except ConnectionRefusedError:
            await self._say(writer, b"\x05\x05\x00" + nowhere)
            return None
        except OSError:
            await self._say(writer, b"\x05\x04\x00" + nowhere)
            return None
        await self._say(writer, b"\x05\x00\x00" + nowhere)
        return there


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _splice(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Copy both ways until one side has ended."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(2**16):
            target.write(piece)
            await target.drain()

    copies = [asyncio.ensure_future(each) for each in (copy(reader, other_writer), copy(other_reader, writer))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in copies:
            each.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--user", default="")
    parser.add_argument("--password", default="")
    args = parser.parse_args()

    async def serve() -> None:
        def tell(host: str, port: int) -> None:
            print(json.dumps({"asked": host, "port": port}), flush=True)

        proxy = SmallProxy(user=args.user, password=args.password, on_request=tell)
        await proxy.start(args.port)
        print(json.dumps({"serves": proxy.port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
