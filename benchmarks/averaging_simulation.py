"""Matchmaking and averaging of many peers on bad networks, simulated in virtual time on one core.

    python -m benchmarks.averaging_simulation --scenario meeting --table dht --runs 1000
    python -m benchmarks.averaging_simulation --scenario gathering
    python -m benchmarks.averaging_simulation --scenario arriving
    python -m benchmarks.averaging_simulation --scenario deaths --runs 1000
    python -m benchmarks.averaging_simulation --scenario mixing

Each run has a seed of its own, and the same seed gives the same run. Scenarios:

- ``meeting``: 64 peers on links of 20 to 150 ms each way, with jitter, where one in a hundred attempts to connect
  fails, begin within a second of each other and look for a group for five seconds. In how many runs are all in one
  group? With ``--table shared`` they find each other by a table that knows everything, 150 ms away; with
  ``--table dht`` by the distributed one, of which each peer is a node.
- ``gathering``: 16 peers begin at the same moment, again and again, and their group is complete when it has all of
  them, as in ``matchmaking.py``. How long does it take on links of different length, if each has a machine of its own?
- ``arriving``: 300 peers begin one after the other within half a minute, as at the end of an epoch, and look for groups
  of 16 under keys of a certain depth. How large are their groups?
- ``deaths``: on the same links, 8 of 16 peers die at random moments of a round, some with a word and some without.
  Every survivor must be done in time, with the exact average over those who delivered, or the run fails.
- ``mixing``: 1,000 peers, whose values lie around 1 with a standard deviation of 0.05, average in groups of 16, again
  and again in other groups. How far are they from the mean of all?

The same things are tested at smaller size in ``tests/simulation``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import psutil

from shoal.testing import Link
from tests.simulation.deaths import run_round_with_deaths
from tests.simulation.meetings import meet, meet_again_and_again, meet_one_after_the_other
from tests.simulation.mixing import mix

REPORT_EVERY = 50
ARRIVAL_SECONDS = 30.0
GATHERINGS = 7
LINKS = {
    "0.5 ms": Link(delay=0.0005),
    "5 to 20 ms": Link(delay=(0.005, 0.02)),
    "10 to 150 ms": Link(delay=(0.01, 0.15)),
}
"""One way, by how they are called."""


def meeting(arguments: argparse.Namespace) -> dict[str, object]:
    in_one_group, seconds, others = 0, [], []
    for seed in _seeds(arguments):
        result = meet(seed, arguments.peers, distributed=arguments.table == "dht")
        if result.group_sizes == {arguments.peers: arguments.peers}:
            in_one_group += 1
            seconds.append(result.seconds)
        else:
            others.append({"seed": seed, "peers by size of their group": dict(result.group_sizes)})
            print(others[-1], file=sys.stderr, flush=True)
    return {
        "table": arguments.table,
        "peers": arguments.peers,
        "all in one group": f"{in_one_group} of {arguments.runs}",
        "latest end in seconds": max(seconds, default=None),
        "other runs": others,
    }


def gathering(arguments: argparse.Namespace) -> dict[str, object]:
    figures: dict[str, object] = {"peers": arguments.peers}
    seeds = list(_seeds(arguments))
    for name, link in LINKS.items():
        runs = [meet_again_and_again(seed, arguments.peers, GATHERINGS, link=link) for seed in seeds]
        later = [meeting for meetings in runs for meeting in meetings[1:]]
        figures[f"links of {name}: seconds, first time"] = median(meetings[0].seconds for meetings in runs)
        figures[f"links of {name}: seconds, later"] = median(meeting.seconds for meeting in later)
        figures[f"links of {name}: calls, later"] = median(meeting.calls for meeting in later)
        figures[f"links of {name}: not all in one group"] = sum(len(m.group_sizes) > 1 for m in itertools.chain(*runs))
    return figures


def arriving(arguments: argparse.Namespace) -> dict[str, object]:
    sizes: list[int] = []
    how = {"seconds": ARRIVAL_SECONDS, "depths": arguments.depths}
    for seed in _seeds(arguments):
        sizes += meet_one_after_the_other(seed, arguments.peers, arguments.group_size, **how)
    return {
        "peers": arguments.peers,
        "depths of keys": arguments.depths,
        "median group": median(sizes),
        "peers in groups under half the size": sum(size < arguments.group_size / 2 for size in sizes) / len(sizes),
        "alone": sum(size == 0 for size in sizes),
    }


def deaths(arguments: argparse.Namespace) -> dict[str, object]:
    dying, averaged, failures, memory = arguments.peers // 2, 0, [], []
    for seed in _seeds(arguments):
        try:
            averaged += run_round_with_deaths(seed, arguments.peers, dying)
        except AssertionError as error:
            failures.append({"seed": seed, "what": str(error)[:500]})
            print(failures[-1], file=sys.stderr, flush=True)
        memory.append(round(psutil.Process().memory_info().rss / 1e6, 1))
    return {
        "peers": arguments.peers,
        "of which die": dying,
        "survivors who averaged with others": averaged / (arguments.runs * (arguments.peers - dying)),
        "failed runs": failures,
        "memory in MB after each tenth of the runs": memory[:: max(1, arguments.runs // 10)] + memory[-1:],
    }


def mixing(arguments: argparse.Namespace) -> dict[str, object]:
    largest = []
    for seed in _seeds(arguments):
        spreads = mix(arguments.peers, arguments.group_size, arguments.rounds, seed=seed)
        for number, spread in enumerate(spreads):
            sizes = dict(sorted(spread.group_sizes.items()))
            print(
                f"seed {seed}, after {number} rounds: largest difference from the mean {spread.largest:.2e}, standard "
                f"deviation {spread.standard_deviation:.2e}, shift of the mean {spread.shift:.1e}, peers by size of "
                f"their group {sizes}",
                flush=True,
            )
        largest.append(spreads[-1].largest)
    return {"peers": arguments.peers, "rounds": arguments.rounds, "largest differences at the end": largest}


SCENARIOS: dict[str, tuple[Callable[[argparse.Namespace], dict[str, object]], int, int]] = {
    "meeting": (meeting, 64, 1000),
    "gathering": (gathering, 16, 10),
    "arriving": (arriving, 300, 2),
    "deaths": (deaths, 16, 1000),
    "mixing": (mixing, 1000, 1),
}
"""What is done, with how many peers and how often unless said otherwise."""


def _seeds(arguments: argparse.Namespace) -> Iterator[int]:
    """The seeds of the runs, with a word on standard error now and then: some scenarios take an hour."""
    for number in range(arguments.runs):
        if number and number % REPORT_EVERY == 0:
            print(f"{number} runs", file=sys.stderr, flush=True)
        yield arguments.seed + number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=SCENARIOS, required=True)
    parser.add_argument("--table", choices=["shared", "dht"], default="dht", help="for meeting")
    parser.add_argument("--runs", type=int, help="one seed each")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--peers", type=int)
    parser.add_argument("--group-size", type=int, default=16, help="for mixing and arriving")
    parser.add_argument("--depths", type=int, nargs="+", default=[2], help="for arriving: the peers' in turn")
    parser.add_argument("--rounds", type=int, default=4, help="for mixing")
    arguments = parser.parse_args()
    scenario, peers, runs = SCENARIOS[arguments.scenario]
    arguments.peers, arguments.runs = arguments.peers or peers, arguments.runs or runs
    begin = time.perf_counter()
    figures = scenario(arguments)
    figures |= {"scenario": arguments.scenario, "runs": arguments.runs, "wall seconds": time.perf_counter() - begin}
    for name, value in figures.items():
        print(f"{name:48}{value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
