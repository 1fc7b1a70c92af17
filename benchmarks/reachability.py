"""Whether peers behind routers reach each other, and how soon: real processes on hosts of ``tests/nat``.

    sudo python -m benchmarks.reachability matrix     # 20 dials for each pair of kinds of routers
    sudo python -m benchmarks.reachability times      # joins, and dials from a circuit address
    sudo python -m benchmarks.reachability rounds     # all-reduces of 40 MB
    sudo python -m benchmarks.reachability crash      # the same; a relay is killed in the middle
    sudo python -m benchmarks.reachability silence    # … or loses its power
    sudo python -m benchmarks.reachability resets     # … or connections are reset
    sudo python -m benchmarks.reachability flush      # … or a router forgets its translations
    sudo python -m benchmarks.reachability departure  # the only public peer goes, and another one turns public
    sudo python -m benchmarks.reachability relay      # a relay at its rate
    sudo python -m benchmarks.reachability lines      # uplinks of 100 Mbit/s, directly and through a relay
    sudo python -m benchmarks.reachability mapping    # routers that open ports when asked

Any two lines are 30 ms from each other, one way. Each figure has its bar beside it; the last word of a line says
whether it is held.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.broken_rounds import crash, flush, resets, silence
from benchmarks.callers import Caller, Report, dial, percentile
from benchmarks.rounds_behind_routers import MEGABITS, MEGABYTES, MTU, departure, rounds, start_dht
from tests import nursery
from tests.nat.laboratory import Host, Laboratory
from tests.nat.rules import Kind

# --- matrix -----------------------------------------------------------------------------------------------------------

KINDS = (
    Kind.PUBLIC,
    Kind.FULL_CONE,
    Kind.ADDRESS_RESTRICTED,
    Kind.PORT_RESTRICTED,
    Kind.CGNAT,
    Kind.SYMMETRIC,
)
RELAYED_PAIRS = (
    {Kind.PORT_RESTRICTED, Kind.SYMMETRIC},
    {Kind.CGNAT, Kind.SYMMETRIC},
    {Kind.SYMMETRIC},
)
DIRECT_SHARE = 0.95


def measure_pair(first: Caller, second: Caller, dials: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Dials in both directions by turns; returns what came of them, and errors."""
    known = {first: first.addresses(), second: second.addresses()}
    results, errors = [], []
    for number in range(dials):
        caller, target = (first, second) if number % 2 == 0 else (second, first)
        try:
            results.append(dial(caller, target, known[target]))
        except RuntimeError as e:
            errors.append(str(e))
    return results, errors


def matrix(args: argparse.Namespace, report: Report) -> None:
    """Each kind with each, itself included; and some settings that are no kinds."""
    with Laboratory() as lab:
        seed = Caller(lab.host(Kind.PUBLIC))
        at = [each for each in seed.addresses() if "/11." in each]
        if args.no_udp:
            lab.wire.block_udp()

        def start(host: Host) -> Caller:
            return Caller(host, at, relay=False)

        pairs = [
            (kind, [start(lab.host(kind, rst=args.rst and kind in KINDS[1:])) for _ in range(2)]) for kind in KINDS
        ]
        lan = lab.router(Kind.PORT_RESTRICTED)
        same = [start(lan.host()) for _ in range(2)]
        six = [start(lab.host(kind, ipv6="firewalled")) for kind in (Kind.SYMMETRIC, Kind.CGNAT)]
        for kind, callers in pairs:
            for caller in callers:
                caller.ask("wait_until", "public" if kind is Kind.PUBLIC else "relayed")
        for caller in (*same, *six):
            caller.ask("wait_until", "relayed")
        time.sleep(args.settle)
        for (kind, ours), (other, theirs) in itertools.combinations_with_replacement(pairs, 2):
            second = theirs[1] if kind is other else theirs[0]
            tell_pair(f"{kind.value} - {other.value}", ours[0], second, {kind, other} in RELAYED_PAIRS, args, report)
        tell_pair("two hosts behind one router", *same, False, args, report)
        tell_pair("firewalled IPv6, symmetric - CGNAT over IPv4", *six, False, args, report)
    with Laboratory() as lab:
        seed = Caller(lab.host(Kind.PUBLIC), host_maddrs=["/ip4/0.0.0.0/tcp/443"])
        at = [each for each in seed.addresses() if "/11." in each]
        shut = [Caller(lab.host(Kind.PORT_RESTRICTED, only_port=443), at, relay=False) for _ in range(2)]
        for caller in shut:
            caller.ask("wait_until", "relayed")
        tell_pair("only port 443 out, a relay there", *shut, True, args, report)


def tell_pair(
    what: str, first: Caller, second: Caller, is_relayed: bool, args: argparse.Namespace, report: Report
) -> None:
    results, errors = measure_pair(first, second, args.dials)
    relayed = sum(result["relayed"][0] for result in results)
    direct = len(results) - relayed
    is_held = not errors and (relayed == args.dials if is_relayed else direct >= DIRECT_SHARE * args.dials)
    how = sorted({name for result in results for name in result["how"] or ["plain"]})
    seconds = median(result["seconds"] for result in results) if results else float("nan")
    report.line(
        what,
        f"{direct} direct, {relayed} relayed" + (f", {len(errors)} failed" if errors else ""),
        "R 100 %" if is_relayed else "D 95 %",
        is_held,
        f"median {seconds:.2f} s, {' '.join(how)} {errors[0] if errors else ''}",
    )


# --- times ------------------------------------------------------------------------------------------------------------


def times(args: argparse.Namespace, report: Report) -> None:
    """From the join to being callable, and from a circuit address to a stream."""
    with Laboratory() as lab:
        seed = Caller(lab.host(Kind.PUBLIC))
        at = [each for each in seed.addresses() if "/11." in each]
        joins = [measure_join(lab.host(Kind.PORT_RESTRICTED), at) for _ in range(args.joins)]
        for what, taken, bar in zip(
            ("first connection", "call of DHT"), zip(*joins, strict=True), (2.0, 0.0), strict=True
        ):
            report.line(
                f"private peer, from its {what} until it can be called",
                f"{median(taken):.2f} s",
                f"{bar:g} s" if bar else "(for scale)",
                not bar or median(taken) <= bar,
                " ".join(f"{each:.2f}" for each in taken),
            )
        easy = [Caller(lab.host(Kind.PORT_RESTRICTED), at, relay=False) for _ in range(2)]
        hard = [Caller(lab.host(Kind.SYMMETRIC), at, relay=False) for _ in range(2)]
        for caller in (*easy, *hard):
            caller.ask("wait_until", "relayed")
        time.sleep(args.settle)
        measure_punches(*easy, args.dials, report)
        measure_relayed(*hard, max(3, args.dials // 4), report)


def measure_join(host: Host, at: Sequence[str]) -> tuple[float, float]:
    """Seconds from the first connection, and from the call of ``DHT``, until a private peer can be called."""
    caller = Caller(host, at, relay=False)
    caller.ask("wait_until", "relayed")
    seconds = caller.ask("milestones")
    caller.leave()
    return seconds["relayed"] - seconds["connected"], seconds["relayed"]


def measure_punches(first: Caller, second: Caller, dials: int, report: Report) -> None:
    singles, eights, relayed = [], [], 0
    addresses = second.addresses()
    for _ in range(dials):
        for count, found in ((1, singles), (8, eights)):
            result = dial(first, second, addresses, count)
            relayed += sum(result["relayed"])
            if len(result["relayed"]) == count:
                found.append(result["seconds"])
    told = f"{len(singles)} + {len(eights)} dials, {relayed} streams relayed"
    report.line(
        "circuit address to direct stream, median", f"{median(singles):.2f} s", "0.75 s", median(singles) <= 0.75, told
    )
    p95 = percentile(singles, 0.95)
    report.line("… 95th percentile", f"{p95:.2f} s", "1.5 s", p95 <= 1.5 and not relayed)
    ratio = median(eights) / median(singles)
    report.line("… 8 at once, median", f"{ratio:.2f} × 1", "1.2 ×", ratio <= 1.2, f"{median(eights):.2f} s")


def measure_relayed(first: Caller, second: Caller, dials: int, report: Report) -> None:
    firsts, seconds = [], []
    addresses = second.addresses()
    for _ in range(dials):
        for caller in (first, second):
            caller.ask("forget_punches")
        firsts.append(dial(first, second, addresses)["seconds"])
        time.sleep(PUNCH_IS_OVER_SECONDS)
        seconds.append(dial(first, second, addresses)["seconds"])
    report.line("symmetric pair to relayed stream, median", f"{median(firsts):.2f} s", "1.4 s", median(firsts) <= 1.4)
    report.line("… second dial, median", f"{median(seconds):.2f} s", "0.65 s", median(seconds) <= 0.65)


PUNCH_IS_OVER_SECONDS = 3.0


# --- relay ------------------------------------------------------------------------------------------------------------

RATE = 6_250_000.0
"""Bytes per second: the default of a peer that trains."""


def relay(args: argparse.Namespace, report: Report) -> None:
    """Eight circuits of a relay at its rate, and small calls beside them."""
    with Laboratory() as lab:
        seed = Caller(lab.host(Kind.PUBLIC))
        at = [each for each in seed.addresses() if "/11." in each]
        peers = [Caller(lab.host(Kind.SYMMETRIC), at, relay=False) for _ in range(4)]
        for caller in peers:
            caller.ask("wait_until", "relayed")
        time.sleep(args.settle)
        senders, receivers = peers[:2], peers[2:]
        idle = seed.ask("echo", peers[0].peer_id, 20) + peers[0].ask("echo", seed.peer_id, 20)
        begin = time.monotonic() + args.seconds / 2
        end = begin + args.seconds
        for sender, receiver in itertools.product(senders, receivers):
            sender.ask("know", receiver.peer_id, receiver.addresses())
        targets = [receiver.peer_id for receiver in receivers for _ in range(2)]
        pouring = [(sender, sender.tell("pour", targets, begin, end)) for sender in senders]
        while time.monotonic() < begin:
            time.sleep(0.1)
        busy = []
        while time.monotonic() < end - 1:
            busy += peers[2].ask("echo", seed.peer_id, 5)
        rates = [rate for sender, number in pouring for rate in sender.answer(number)]
    told = " ".join(f"{rate / 1e6:.2f}" for rate in rates)
    report.line(
        "8 circuits of a relay, sum", f"{sum(rates) / 1e6:.2f} MB/s", "5.94–6.56", abs(sum(rates) / RATE - 1) <= 0.05
    )
    worst = max(abs(rate / (RATE / 8) - 1) for rate in rates)
    report.line("… furthest from an eighth", f"{100 * worst:.0f} %", "15 %", worst <= 0.15, told)
    ratio = median(busy) / median(idle)
    report.line("… control calls", f"{ratio:.2f} × idle", "2 ×", ratio < 2, f"{1e3 * median(busy):.0f} ms")


# --- lines ------------------------------------------------------------------------------------------------------------

STRIPES = 4


def lines(args: argparse.Namespace, report: Report) -> None:
    """What an uplink carries to one other peer, straight and through a relay that has no limit."""
    with Laboratory(mtu=MTU) as lab:
        at = start_dht(lab.host(Kind.PUBLIC))
        for what, kind, bar in (("directly", Kind.PORT_RESTRICTED, 10.0), ("through a relay", Kind.SYMMETRIC, 8.0)):
            sender, receiver = [
                Caller(host, at, relay=False) for host in [lab.host(kind, megabits=MEGABITS) for _ in range(2)]
            ]
            for caller in (sender, receiver):
                caller.ask("wait_until", "relayed")
            time.sleep(args.settle)
            sender.ask("know", receiver.peer_id, receiver.addresses())
            begin = time.monotonic() + args.seconds / 2
            rates = sender.ask("pour", [receiver.peer_id] * STRIPES, begin, begin + args.seconds)
            metrics = sender.ask("metrics")
            report.line(
                f"{STRIPES} stripes {what}, uplink of {MEGABITS:g} Mbit/s, 60 ms",
                f"{sum(rates) / 1e6:.2f} MB/s",
                f"{bar:g} MB/s",
                sum(rates) / 1e6 >= bar,
                f"{' '.join(f'{each / 1e6:.2f}' for each in rates)}, {metrics['dials_punched']} punched, "
                f"{metrics['dials_relayed']} relayed",
            )
            for caller in (sender, receiver):
                caller.leave()


# --- mapping ----------------------------------------------------------------------------------------------------------


def mapping(args: argparse.Namespace, report: Report) -> None:
    """Routers that open ports when asked."""
    with Laboratory() as lab:
        seeds = [Caller(lab.host(Kind.PUBLIC))]
        at = [each for each in seeds[0].addresses() if "/11." in each]
        seeds.append(Caller(lab.host(Kind.PUBLIC), at))
        seeds[1].greeting()

        def start(kind: Kind, upnp: bool = False, outer: str = "") -> Caller:
            host = lab.host(kind)
            host.router.start_port_mapper(upnp=upnp, outer=outer)
            time.sleep(args.settle)  # it says nothing when it is ready
            return Caller(host, at)

        for kind in (Kind.PORT_RESTRICTED, Kind.SYMMETRIC):
            caller = start(kind)
            seconds = caller.greeting()["started"] + caller.ask("wait_until", "public")
            calls = dial(seeds[1], caller, caller.outer_addresses())
            report.line(
                f"PUBLIC behind a {kind.value} router with PCP",
                f"{seconds:.1f} s",
                "5 s",
                seconds <= 5.0 and not calls["relayed"][0],
                f"dialled at {calls['at'][0]}",
            )
        for what, outer in (("refuses", ""), ("opens a port in vain", "11.0.200.2")):
            caller = start(Kind.CGNAT, outer=outer)
            caller.ask("wait_until", "relayed")
            time.sleep(10)
            look = caller.ask("look")
            told = [each for each in look["addresses"] if "p2p-circuit" not in each and "/11." in each]
            is_held = look["reachability"] == "relayed" and not told
            report.line(
                f"double NAT, whose inner router {what}", look["reachability"], "relayed", is_held, " ".join(told)
            )


COMMANDS: dict[str, Callable[[argparse.Namespace, Report], None]] = {
    "matrix": matrix,
    "times": times,
    "rounds": rounds,
    "crash": crash,
    "silence": silence,
    "resets": resets,
    "flush": flush,
    "departure": departure,
    "relay": relay,
    "lines": lines,
    "mapping": mapping,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*COMMANDS, "all"])
    parser.add_argument("--dials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disturbed", type=int, default=3, help="rounds of each kind of disturbance")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES, help="of the rounds in which something breaks")
    parser.add_argument("--joins", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="that count, of a relay at its rate")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds after the joins, before it begins")
    parser.add_argument("--rst", action="store_true", help="routers refuse what they do not let in")
    parser.add_argument("--no-udp", action="store_true", help="nothing but TCP anywhere")
    args = parser.parse_args()
    report = Report()
    try:
        for name, run in COMMANDS.items():
            if args.what in (name, "all"):
                run(args, report)
    finally:
        nursery.Nursery.close()
    print(f"{report.missed} bars missed")


if __name__ == "__main__":
    main()
