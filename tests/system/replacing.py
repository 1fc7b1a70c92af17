"""A swarm of processes of which one after another is killed, and replaced by one that has been started ahead."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence

from tests.system.swarm import START_LIMIT_SECONDS, Peer


class ReplacedPeers:
    """Living peers, and one that is ready to take the place of the next victim.

    Args:
        script: says ``ready``, reads the addresses of others from its standard input, and says its own ``address``.
        arguments: of the script, for the peer with this number.
        peers: how many live at a time.
    """

    def __init__(self, script: str, arguments: Callable[[int], Sequence[object]], peers: int) -> None:
        self._script, self._arguments, self._started = script, arguments, 0
        self.living: list[Peer] = []
        self.victims: list[Peer] = []
        self._spares: list[Peer] = []
        try:
            while len(self._spares) < peers + 1:
                self._start_spare()
            for _ in range(peers):
                self._join()
        except BaseException:
            self.close()
            raise

    def kill_for(self, seconds: float, every: float, rng: random.Random) -> None:
        """Kill a peer after each so many seconds, and let another one come."""
        began = time.monotonic()
        for number in range(1, int(seconds / every) + 1):
            time.sleep(max(0.0, began + number * every - time.monotonic()))
            self._spares[0].wait_for("ready", START_LIMIT_SECONDS)  # else there would be fewer and fewer
            victim = self.living.pop(rng.randrange(len(self.living)))
            victim.process.kill()
            victim.wait(START_LIMIT_SECONDS)
            self.victims.append(victim)
            self._join()
            self._start_spare()
        time.sleep(max(0.0, began + seconds - time.monotonic()))

    def _start_spare(self) -> None:
        self._spares.append(Peer(self._script, *self._arguments(self._started)))
        self._started += 1

    def _join(self) -> None:
        """The oldest spare begins to take part."""
        peer = self._spares[0]
        peer.wait_for("ready", START_LIMIT_SECONDS)
        peer.tell(json.dumps([event["address"] for other in self.living for event in other.all("address")]))
        peer.wait_for("address", START_LIMIT_SECONDS)
        self.living.append(self._spares.pop(0))

    def leave(self, timeout: float) -> None:
        """All end by themselves, each within so many seconds."""
        for peer in self.living:
            peer.tell("leave")
        for peer in self.living:
            peer.wait_for("done", timeout)
            assert peer.wait(timeout) == 0, peer.errors()

    @property
    def log(self) -> str:
        """What all have written to their standard error."""
        return "".join(peer.errors() for peer in self.victims + self.living)

    def close(self) -> None:
        for peer in self.victims + self.living + self._spares:
            peer.close()
