"""All-reduces among hosts behind routers: four of them, each with an uplink of 100 Mbit/s, for ``reachability.py``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.callers import Caller, Report, middle
from benchmarks.crew import AveragerCrew, Crew
from tests.nat.laboratory import Host, Laboratory
from tests.nat.rules import Kind
from tests.system.swarm import START_LIMIT_SECONDS

MEGABYTES, MEGABITS = 40, 100.0
MTU = 9000
"""With small packets the wire, a Python program, needs more than a core for four hosts and a relay."""
PEERS = 4
MOST_CARRIED = 100_000


class BehindRouters(AveragerCrew):
    """Averagers that find each other through a public machine.

    Args:
        hosts: where they run.
        seed: addresses of that machine.
        megabytes: what each of them averages.
    """

    def __init__(self, hosts: Sequence[Host], seed: Sequence[str], megabytes: float = MEGABYTES) -> None:
        self._seed = list(seed)
        super().__init__("shoal", len(hosts), megabytes, hosts=hosts)

    def _get_ready(self) -> None:
        Crew._get_ready(self)
        self.ask("open", self._seed, to=self.processes[:1])
        self.ask("join", self._seed)

    def round(self, disturb: Callable[[], object] | None = None, after: float = 0.0) -> float:
        """Average once and check the result; returns the seconds that it took.

        Args:
            disturb: what happens meanwhile.
            after: seconds from the beginning.
        """
        self.ask("fill")
        self.ask("form")
        self.tell("reduce")
        if disturb is not None:
            time.sleep(after)
            disturb()
        spans = self.answers_of(self.processes)
        self.ask("check")
        if len({found["digest"] for found in self.ask("inspect", list(range(len(self.processes))))}) != 1:
            raise RuntimeError("the right average, but not the same bytes everywhere")
        return max(span["ended"] for span in spans) - min(span["began"] for span in spans)

    def settle(self) -> None:
        """After a disturbance: rounds until one goes well."""
        for _ in range(5):
            try:
                self.round()
            except RuntimeError:
                continue
            return

    def rounds(self, count: int) -> tuple[list[float], list[str]]:
        """After one that does not count: the seconds of those that went well, and what went wrong in the others."""
        taken, errors = [], []
        for _ in range(count + 1):
            try:
                taken.append(self.round())
            except RuntimeError as e:
                taken.append(float("nan"))
                errors.append(str(e))
        return [each for each in taken[1:] if each == each], errors


def start_hosts(lab: Laboratory, kinds: Sequence[Kind]) -> list[Host]:
    return [lab.host(kind, megabits=MEGABITS) for kind in kinds]


def start_dht(host: Host, initial_peers: Sequence[str] = ()) -> list[str]:
    """``shoal dht``, which relays without a limit; returns its address."""
    joining = ["--initial-peers", *initial_peers] if initial_peers else []
    program = host.start("-m", "shoal.cli", "dht", *joining)
    return [program.wait_for_line("--initial-peers (/ip4/.*)$", START_LIMIT_SECONDS)[1]]


def rounds(args: argparse.Namespace, report: Report) -> None:
    """All-reduces of 40 MB among four, each with 100 Mbit/s: all of them easy, or half of them hard."""
    with Laboratory(mtu=MTU) as lab, public_crew(lab) as public:
        seed = Caller(lab.host(Kind.PUBLIC))
        at = [each for each in seed.addresses() if "/11." in each]
        with BehindRouters(start_hosts(lab, [Kind.PORT_RESTRICTED] * PEERS), at) as easy:
            compare("4 easy private peers and a public one", public, easy, 1.10, args, report)
            carried = seed.ask("metrics")["bytes_carried"]
            is_held = carried < MOST_CARRIED
            report.line("… carried by the relay", f"{carried / 1e3:.0f} kB", "100 kB", is_held)
    with Laboratory(mtu=MTU) as lab, public_crew(lab) as public:
        kinds = [Kind.PORT_RESTRICTED, Kind.PORT_RESTRICTED, Kind.SYMMETRIC, Kind.SYMMETRIC]
        at = start_dht(lab.host(Kind.PUBLIC))
        with BehindRouters(start_hosts(lab, kinds), at) as hard:
            compare("2 of 4 symmetric, relay without a limit", public, hard, 1.5, args, report)


def public_crew(lab: Laboratory) -> BehindRouters:
    """Four averagers without routers, for scale."""
    return BehindRouters(start_hosts(lab, [Kind.PUBLIC] * PEERS), start_dht(lab.host(Kind.PUBLIC)))


def compare(
    what: str, public: BehindRouters, crew: BehindRouters, most: float, args: argparse.Namespace, report: Report
) -> None:
    """Rounds of a crew and of public peers by turns, so that other work on this machine slows both down."""
    crews = (public, crew)
    taken: dict[BehindRouters, list[float]] = {each: [] for each in crews}
    errors: dict[BehindRouters, list[str]] = {each: [] for each in crews}
    for each in crews:
        each.settle()  # the first round makes connections, and does not count
    for _ in range(args.rounds):
        for each in crews:
            try:
                taken[each].append(each.round())
            except RuntimeError as e:
                errors[each].append(str(e))
    usual, told = middle(taken[public]), tell_rounds(taken[public], errors[public])
    report.line("4 public peers, 40 MB, median", f"{usual:.2f} s", "(for scale)", not errors[public], told)
    told = tell_rounds(taken[crew], errors[crew])
    ratio = middle(taken[crew]) / usual
    report.line(what, f"{ratio:.2f} × public", f"{most:g} ×", ratio <= most and not errors[crew], told)


def tell_rounds(taken: Sequence[float], errors: Sequence[str]) -> str:
    told = " ".join(f"{each:.2f}" for each in taken)
    return told + (f"   {len(errors)} went wrong: {' '.join(errors[0].split())[:300]}" if errors else "")


# --- departure --------------------------------------------------------------------------------------------------------

SMALL_MEGABYTES = 4
RESERVED_WITHIN = 35.0
DEPARTURE_LIMIT_SECONDS = 180.0
ROUNDS_AFTERWARDS = 5


def departure(args: argparse.Namespace, report: Report) -> None:
    """The only public machine loses its power in the middle of a round; the router of one peer forwards a port then."""
    with Laboratory(mtu=MTU) as lab:
        public = lab.host(Kind.PUBLIC)
        at = start_dht(public)
        hosts = [lab.host(Kind.PORT_RESTRICTED, megabits=MEGABITS) for _ in range(PEERS)]
        with BehindRouters(hosts, at, SMALL_MEGABYTES) as crew:
            usual, wrong = crew.rounds(args.rounds)
            [first, *_] = crew.ask("look")
            gone_at = float("nan")

            def disturb() -> None:
                nonlocal gone_at
                gone_at = time.monotonic()
                public.line.cut()
                hosts[0].router.forward(first["port"], hosts[0])

            taken, errors, left, reserved_after = [], [], ROUNDS_AFTERWARDS, float("nan")
            while left and not time.monotonic() - gone_at > DEPARTURE_LIMIT_SECONDS:
                try:
                    taken.append(crew.round(None if taken or errors else disturb, middle(usual) / 2))
                except RuntimeError as e:
                    errors.append(str(e))
                looks = crew.ask("look")
                if reserved_after != reserved_after and is_settled(looks):
                    reserved_after = time.monotonic() - gone_at
                left -= reserved_after == reserved_after
    told = f"{tell_rounds(usual, wrong)} before; then {tell_rounds(taken, errors)}"
    what = "the only public peer goes: rounds that went wrong"
    report.line(what, f"{len(errors)} of {len(errors) + len(taken)}", "0", not errors, told)
    states = " ".join(f"{look['reachability']} {look['reservations']}" for look in looks)
    is_held = reserved_after <= RESERVED_WITHIN
    report.line("… new reservations, at a peer that turned public", f"{reserved_after:.1f} s", "35 s", is_held, states)


def is_settled(looks: Sequence[dict[str, Any]]) -> bool:
    """Whether one peer can be called, and all others hold a reservation there."""
    first, *others = looks
    return first["reachability"] == "public" and all(look["holds"] == [first["peer_id"]] for look in others)
