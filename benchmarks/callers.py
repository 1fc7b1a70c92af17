"""Peers of ``tests/nat`` that do what they are told, and reports of what they did, for benchmarks of reachability."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.nat.laboratory import Host
from tests.system.swarm import START_LIMIT_SECONDS, Peer

SCRIPT = Path(__file__).parents[1] / "tests" / "nat" / "call_others.py"
ANSWER_LIMIT_SECONDS = 120.0


class Caller:
    """A process of ``call_others.py`` on a host.

    Args:
        host: where it runs.
        initial_peers: addresses; empty: it is the first one.
        options: further parameters of its ``DHT``.
    """

    _numbers = itertools.count()

    def __init__(self, host: Host, initial_peers: Sequence[str] = (), **options: Any) -> None:
        self.host = host
        self._process: Peer = host.start(SCRIPT)
        self._process.tell(json.dumps({"initial_peers": list(initial_peers), **options}))

    def greeting(self) -> dict[str, Any]:
        """What it has said when it had joined."""
        return self._process.wait_for("peer_id", START_LIMIT_SECONDS)

    @property
    def peer_id(self) -> str:
        return self.greeting()["peer_id"]

    def tell(self, command: str, *arguments: Any) -> int:
        """Give a command; returns the number under which the answer comes."""
        number = next(self._numbers)
        self._process.tell(json.dumps([number, command, *arguments]))
        return number

    def answer(self, number: int) -> Any:
        """What came of a command.

        Raises:
            RuntimeError: it failed.
        """
        event = self._process.wait_for("number", ANSWER_LIMIT_SECONDS, lambda event: event["number"] == number)
        if "error" in event:
            raise RuntimeError(f"{self.host.namespace}: {event['error']}")
        return event["result"]

    def ask(self, command: str, *arguments: Any) -> Any:
        return self.answer(self.tell(command, *arguments))

    def addresses(self) -> list[str]:
        """Where it can be called."""
        return self.ask("look")["addresses"]

    def outer_addresses(self) -> list[str]:
        """Those that are worth telling strangers."""
        return [each for each in self.addresses() if each.startswith(("/ip4/11.", "/ip6/2a0f"))]

    def errors(self) -> str:
        return self._process.errors()

    def leave(self) -> None:
        """End it."""
        self._process.close()


class Report:
    """Lines with figures and bars."""

    def __init__(self) -> None:
        self.missed = 0

    def line(self, what: str, figure: str, bar: str, is_held: bool, details: str = "") -> None:
        self.missed += not is_held
        print(f"{what:<62} {figure:>16}   bar {bar:<12} {'held' if is_held else 'MISSED'}   {details}", flush=True)


def middle(values: Sequence[float]) -> float:
    """The median, if there are any."""
    return median(values) if values else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def dial(caller: Caller, target: Caller, addresses: Sequence[str], count: int = 1) -> dict[str, Any]:
    return caller.ask("dial", target.peer_id, addresses, count)
