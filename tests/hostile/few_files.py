"""A peer in a process that may open few files. It answers calls, and its user opens files meanwhile.

With the address of a relay, others reach it through that one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.p2p import P2P, P2PContext, ServicerBase
from tests.p2p.peers import Number

LOOK_SECONDS = 0.005


class Squares(ServicerBase):
    """Something to call."""

    async def rpc_square(self, request: Number, context: P2PContext) -> Number:
        return Number(value=request.value**2)


def open_files() -> int:
    """The number of files that this process has open, without the one that is needed to count them."""
    return len(os.listdir("/proc/self/fd")) - 1


class Look:
    """Counts open files again and again, in a thread of its own; to count them it has to open one."""

    def __init__(self) -> None:
        self._own = open_files()
        self.most = self.opened = self.failed = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            try:
                self.most = max(self.most, open_files() - self._own)
                self.opened += 1
            except OSError:
                self.failed += 1

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


async def main(files: int, relay: str | None = None) -> None:
    import resource

    # The hard limit too, because shoal raises the soft one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if relay is None:
        p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    else:
        p2p = await P2P.create(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], force_reachability="private", trusted_relays=[relay]
        )
    await Squares().add_p2p_handlers(p2p)
    look = Look()
    say(address=f"{p2p.get_addresses(p2p.peer_id)[0]}/p2p/{p2p.peer_id}")
    await asyncio.to_thread(sys.stdin.readline)
    look.end()
    say(most=look.most, opened=look.opened, failed=look.failed, connections=p2p.server.connection_count)
    await p2p.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
