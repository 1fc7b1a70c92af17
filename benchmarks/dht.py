"""How fast a swarm's DHT is and what it takes: shoal and hivemind, one process per peer, on this machine's loopback.

    python benchmarks/dht.py --library all --peers 16
    python benchmarks/dht.py --library shoal --peers 32

Each run starts a new swarm. Then one peer stores keys one after another and others get them, for the latencies; then
all peers do the same at once, each from several threads. Every value that is got is compared with what was stored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from crew import Crew

LIBRARIES = ("shoal", "hivemind")
OPERATIONS = ("store", "get", "get latest")


@dataclass(frozen=True)
class Column:
    """One thing that is compared."""

    title: str
    unit: str
    more_is_better: bool = False
    digits: int = 1


COLUMNS = {
    "start": Column("start of the swarm", "s", digits=2),
    **{f"{name} median": Column(f"{name}, one after another, median", "ms", digits=2) for name in OPERATIONS},
    **{f"{name} p99": Column(f"{name}, one after another, p99", "ms", digits=2) for name in OPERATIONS},
    **{f"{name}s per second": Column(f"{name}, all peers at once", "/s", True, 0) for name in OPERATIONS},
    **{f"{name} cpu": Column(f"{name}, all peers at once, processor time", "ms", digits=2) for name in OPERATIONS},
    "refused": Column("stores that returned False", "%", digits=2),
    "lost": Column("stores that latest gets did not find", "%", digits=2),
    "missed": Column("stores that plain gets did not find", "%", digits=2),
    "memory joined": Column("private memory per peer, after the start", "MB"),
    "memory": Column("private memory per peer, at the end", "MB"),
    "processes": Column("processes per peer", "", digits=0),
}


@dataclass
class Tally:
    """Operations done and failed."""

    done: int = 0
    failed: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.failed / self.done


@dataclass
class Swarm:
    """The peers of one library during one run, and what has been measured on them."""

    crew: Crew
    args: argparse.Namespace
    values: dict[str, float] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in OPERATIONS})

    def measure(self) -> dict[str, float]:
        self._start()
        self.values["memory joined"] = self._private_megabytes()
        self._one_after_another()
        self._all_at_once()
        for column, operation in (("refused", "store"), ("lost", "get latest"), ("missed", "get")):
            self.values[column] = self.tallies[operation].percent
        self.values["memory"] = self._private_megabytes()
        self.values["processes"] = self.crew.process_count() / self.args.peers
        return self.values

    def _private_megabytes(self) -> float:
        return self.crew.private_bytes() / self.args.peers / 1e6

    def _start(self) -> None:
        """The first peer, and then all others at once, which know only the first one."""
        first, others = self.crew.processes[:1], self.crew.processes[1:]
        seconds = self.crew.time("begin", to=first)
        [addresses] = self.crew.ask("addresses", to=first)
        self.values["start"] = seconds + self.crew.time("join", addresses, to=others)

    def _one_after_another(self) -> None:
        """One peer stores, and two others get."""
        keys = self.args.keys
        storing, getting, latest = (self.crew.processes[number : number + 1] for number in (1, 2, 3))
        self._note_latency("store", *self.crew.ask("store", "single", keys, False, to=storing))
        self._note_latency("get", *self.crew.ask("get", 1, "single", keys, False, False, to=getting))
        self._note_latency("get latest", *self.crew.ask("get", 1, "single", keys, True, False, to=latest))

    def _note_latency(self, operation: str, span: dict[str, Any]) -> None:
        self._count(operation, [span])
        self.values[f"{operation} median"] = 1e3 * median(span["seconds"])
        self.values[f"{operation} p99"] = 1e3 * quantiles(span["seconds"], n=100)[98]

    def _all_at_once(self) -> None:
        """Each peer stores its own keys; then each gets those of one peer, and the latest values of another one's."""
        keys, peers = self.args.keys_at_once, self.args.peers
        self._note_rate("store", lambda index: ("store", "together", keys, True))
        self._note_rate("get", lambda index: ("get", (index + 1) % peers, "together", keys, False, True))
        self._note_rate("get latest", lambda index: ("get", (index + 2) % peers, "together", keys, True, True))

    def _note_rate(self, operation: str, command: Callable[[int], tuple[Any, ...]]) -> None:
        cpu_before = self.crew.cpu_seconds()
        spans = self.crew.ask_each(command)
        cpu_seconds = self.crew.cpu_seconds() - cpu_before
        self._count(operation, spans)
        seconds = max(span["ended"] for span in spans) - min(span["began"] for span in spans)
        count = sum(len(span["seconds"]) for span in spans)
        self.values[f"{operation}s per second"] = count / seconds
        self.values[f"{operation} cpu"] = 1e3 * cpu_seconds / count

    def _count(self, operation: str, spans: list[dict[str, Any]]) -> None:
        tally = self.tallies[operation]
        tally.done += sum(len(span["seconds"]) for span in spans)
        tally.failed += sum(len(span["failed"]) for span in spans)


def measure(libraries: list[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {library: {"runs": []} for library in libraries}
    for _ in range(args.runs):
        for library in libraries:
            with Crew("dht_peer.py", library, args.peers, callers=args.callers) as crew:
                results[library]["version"] = crew.version
                results[library]["runs"].append(Swarm(crew, args).measure())
    for result in results.values():
        result["medians"] = {name: median(run[name] for run in result["runs"]) for name in COLUMNS}
    return results


def report(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    runs = "one run" if args.runs == 1 else f"medians of {args.runs} runs"
    print(f"DHT of {args.peers} peers, {args.callers} callers in each when all are at work, {runs}")
    versions = "".join(f"{library} {result['version']}".rjust(18) for library, result in results.items())
    print(f"  {'':<52}{versions}" + "   shoal is better by".rjust(20) * (len(results) > 1))
    for name, column in COLUMNS.items():
        values = [result["medians"][name] for result in results.values()]
        cells = "".join(f"{value:.{column.digits}f} {column.unit:<2}".rjust(18) for value in values)
        print(f"  {column.title:<52}{cells}{_advantage(values, column):>20}")
    print(json.dumps({"peers": args.peers, "callers": args.callers, "results": results}))


def _advantage(values: list[float], column: Column) -> str:
    if len(values) < 2 or 0 in values:
        return ""
    shoal, other = values
    return f"{shoal / other if column.more_is_better else other / shoal:.1f} ×"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], required=True)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--keys", type=int, default=300, help="stored and got one after another")
    parser.add_argument("--keys-at-once", type=int, default=50, help="of each peer when all are at work")
    parser.add_argument("--callers", type=int, default=4, help="threads of each peer when all are at work")
    parser.add_argument("--runs", type=int, default=3, help="swarms of each library, in turn")
    args = parser.parse_args()
    if args.peers < 4:
        parser.error("--peers must be at least 4: some store, others get")
    report(measure(list(LIBRARIES) if args.library == "all" else [args.library], args), args)


if __name__ == "__main__":
    main()
