"""All-reduces among hosts behind routers in which something breaks half-way, for ``reachability.py``.

Each trouble has a crew of four, with an uplink of 100 Mbit/s each. Behind easy routers their connections are direct;
behind symmetric ones all of them lead through relays. There is one relay more than the trouble ends, so everybody has
always two. A round counts if all have the whole average, in the same bytes, and no member was lost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.callers import Report, middle
from benchmarks.rounds_behind_routers import MTU, PEERS, BehindRouters, start_dht, start_hosts
from tests.nat.laboratory import Host, Laboratory
from tests.nat.rules import Kind

RESERVATIONS = 2
"""As many relays as every peer has."""
RESERVED_WITHIN = 180.0
POLL_SECONDS = 0.5


class Scene:
    """Four averagers, and the relays that they have.

    Args:
        lab: where all this is.
        kind: of all their routers.
        relays: how many.
        megabytes: what each averager has.
    """

    def __init__(self, lab: Laboratory, kind: Kind, relays: int, megabytes: float) -> None:
        self.relays = [lab.host(Kind.PUBLIC) for _ in range(relays)]
        seeds: list[str] = []
        for relay in self.relays:
            seeds += start_dht(relay, seeds)
        self.hosts = start_hosts(lab, [kind] * PEERS)
        self.crew = BehindRouters(self.hosts, seeds, megabytes)
        self._carried: dict[Host, int] = {}
        self.ports: list[list[int]] = []
        """At each of the first two members, those of its connections to the other one."""

    def wait_for_reservations(self) -> None:
        """Let everybody find relays."""
        deadline = time.monotonic() + RESERVED_WITHIN
        while min(held := [look["reservations"] for look in self.crew.ask("look")]) < RESERVATIONS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {RESERVED_WITHIN:g} s the members have {held} reservations")
            time.sleep(POLL_SECONDS)

    def note(self) -> None:
        """Before a round: see :attr:`busiest` and :attr:`ports`."""
        self._carried = {relay: self._bytes_from(relay) for relay in self.relays}
        ids = [look["peer_id"] for look in self.crew.ask("look")[:2]]
        pair = zip(self.crew.processes[:2], reversed(ids), strict=True)
        self.ports = [self.crew.ask("ports_to", other, to=[process])[0] for process, other in pair]

    @property
    def busiest(self) -> Host:
        """The relay on which this round depends most."""
        return max(self.relays, key=lambda relay: self._bytes_from(relay) - self._carried[relay])

    def _bytes_from(self, relay: Host) -> int:
        return sum(relay.line.carried_to(host.line) for host in self.hosts)


def kill_relay(scene: Scene) -> None:
    """SIGKILL: its machine says so to whoever is connected."""
    relay = scene.busiest
    scene.relays.remove(relay)
    for program in relay.programs:
        program.process.kill()


def cut_relay(scene: Scene) -> None:
    """Its power fails, and nobody says anything."""
    relay = scene.busiest
    scene.relays.remove(relay)
    relay.line.cut()


def reset_pair(scene: Scene) -> None:
    """All connections between two members are reset, also those that lead through relays."""
    assert any(scene.ports), "the two have no connections"
    for host, ports in zip(scene.hosts[:2], scene.ports, strict=True):
        if ports:  # no filter would be all connections
            host.reset(" or ".join(f"sport = :{port}" for port in ports))


def flush_router(scene: Scene) -> None:
    """A router forgets its translations: all connections of one member are dead, and nobody says anything."""
    scene.hosts[0].router.forget()


@dataclass(frozen=True)
class Trouble:
    """Something that breaks in the middle of a round."""

    name: str
    kind: Kind
    """Of the routers of all four."""
    happen: Callable[[Scene], None]
    most: float
    """Seconds that it may cost."""
    ends_relay: bool = False


CRASHES = [Trouble("relay gets SIGKILL", Kind.SYMMETRIC, kill_relay, 2.0, ends_relay=True)]
SILENCES = [Trouble("relay loses its power", Kind.SYMMETRIC, cut_relay, 15.0, ends_relay=True)]
RESETS = [
    Trouble("TCP of one pair reset, direct", Kind.PORT_RESTRICTED, reset_pair, 1.0),
    Trouble("TCP of one pair reset, relayed", Kind.SYMMETRIC, reset_pair, 1.0),
]
FLUSHES = [
    Trouble("conntrack of one router flushed, direct", Kind.PORT_RESTRICTED, flush_router, 15.0),
    Trouble("conntrack of one router flushed, relayed", Kind.SYMMETRIC, flush_router, 15.0),
]


def crash(args: argparse.Namespace, report: Report) -> None:
    """A relay is killed in the middle of a round."""
    measure(CRASHES, args, report)


def silence(args: argparse.Namespace, report: Report) -> None:
    """A relay is powered off in the middle of a round."""
    measure(SILENCES, args, report)


def resets(args: argparse.Namespace, report: Report) -> None:
    """Connections are reset in the middle of a round."""
    measure(RESETS, args, report)


def flush(args: argparse.Namespace, report: Report) -> None:
    """A router forgets its translations in the middle of a round."""
    measure(FLUSHES, args, report)


def measure(troubles: list[Trouble], args: argparse.Namespace, report: Report) -> None:
    for trouble in troubles:
        relays = RESERVATIONS + args.disturbed * trouble.ends_relay
        with Laboratory(mtu=MTU) as lab:
            scene = Scene(lab, trouble.kind, relays, args.megabytes)
            with scene.crew:
                measure_one(trouble, scene, args, report)


def measure_one(trouble: Trouble, scene: Scene, args: argparse.Namespace, report: Report) -> None:
    """Rounds in which it happens, beside the median of some in which nothing does."""
    crew = scene.crew
    scene.wait_for_reservations()
    undisturbed, wrong = crew.rounds(args.disturbed)
    usual = middle(undisturbed)
    over: list[float] = []
    errors: list[str] = []
    for _ in range(args.disturbed):
        scene.wait_for_reservations()
        scene.note()
        try:
            over.append(crew.round(lambda: trouble.happen(scene), usual / 2) - usual)
        except RuntimeError as e:
            errors.append(" ".join(str(e).split())[:300])
        crew.settle()
    worst = max(over, default=float("nan"))
    told = f"usual {usual:.2f} s" + (f" ({len(wrong)} of them went wrong)" if wrong else "") + ", over "
    report.line(
        f"{trouble.name} in mid-round",
        f"{worst:+.1f} s, {len(over)} of {args.disturbed}",
        f"{trouble.most:g} s, 100 %",
        not errors and worst <= trouble.most,
        told + " ".join([f"{each:+.1f}" for each in over] + errors[:1]),
    )
