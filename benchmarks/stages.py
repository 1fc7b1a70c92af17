"""What a model in stages costs: shoal beside the same computation without a network, and beside hivemind.

    python benchmarks/stages.py --library all
    python benchmarks/stages.py --what rebalancing memory

*Throughput*: two stages in two processes. Each has as many layers as one core of this machine computes in about
``--milliseconds``, forward and back, for one microbatch. The tensor between them has 1 MB. A third process drives.
``torch`` is the best that can be: both processes compute their stage over and over, at the same time, and send nothing.
hivemind has two servers with the same modules as experts, which a pool of threads calls. All its tensors pass the
driver, and it computes forward again on the way back. The libraries take turns.

*Rebalancing*: two equal stages have 4 and 1 peers, and one of the four has ``stage="auto"``. It has to move. Here
stages wait instead of computing, as for a device of their own, so that two cores suffice for five peers.

*Memory*: the peak of a stage peer with AdamW, beyond that of a process that trains the same module with the same
optimizer, microbatch by microbatch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from crew import Crew
from stages_peer import Size, layers_for

LIBRARIES = ("torch", "shoal", "hivemind")
LEAST_OF_TORCH = 0.90
LEAST_OF_HIVEMIND = 2.0
MOST_BESIDE = 2000
"""Bytes of the driver for a microbatch, beside tokens and labels."""
LEAST_GAIN = 1.7
MOST_MEMORY = 64e6
Figures = dict[str, Any]


@contextlib.contextmanager
def crew_of(
    library: str,
    holds: Sequence[Any],
    sizes: Sequence[Size],
    args: argparse.Namespace,
    hosts: Sequence[Any] = (),
    **further: Any,
) -> Iterator[Crew]:
    """Peers that hold these stages; each has joined the first one."""
    arguments = {
        "holds": json.dumps(holds),
        "sizes": json.dumps(sizes),
        "step": args.step,
        "in-flight": args.in_flight,
        **{name: json.dumps(value) for name, value in further.items()},
    }
    with Crew("stages_peer.py", library, len(holds), hosts, **arguments) as crew:
        [addresses] = crew.ask("open", to=crew.processes[:1])
        joining = []
        for number, (process, stage) in enumerate(zip(crew.processes, holds, strict=True)):
            crew.tell("join", addresses, stage, to=[process])
            if number and stage != "auto":  # what this one takes depends on those before it, and not on those after it
                joining.append(process)
            else:
                crew.answers_of([process])
        crew.answers_of(joining)
        yield crew


def rate_of(times: Sequence[float], warmup: int) -> float:
    """Microbatches per second after the first ones."""
    return (len(times) - warmup) / (times[-1] - times[warmup - 1])


def check(what: str, found: float, bar: float, unit: str = "", *, at_most: bool = False) -> bool:
    """Print a line with its bar."""
    is_met = found <= bar if at_most else found >= bar
    print(f"  {what}: {found:.3g}{unit}, {'at most' if at_most else 'at least'} {bar:.3g}{unit}: {_verdict(is_met)}")
    return is_met


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def measure_throughput(args: argparse.Namespace) -> Figures:
    size = Size()
    torch.set_num_threads(1)
    layers = [layers_for(args.milliseconds / 1e3, number, 2, size) for number in range(2)]
    sizes = [size._replace(layers=each) for each in layers]
    print(
        f"two stages of {layers[0]} and {layers[1]} layers, microbatches of {size.rows} samples with a boundary of "
        f"{size.boundary / 1e6:.2f} MB, {args.step} in a step, {args.in_flight} under way"
    )
    libraries = [each for each in LIBRARIES if args.library in (each, "all") or each == "torch"]
    rates: dict[str, list[float]] = {library: [] for library in libraries}
    processor: dict[str, list[float]] = {library: [] for library in libraries}
    sent: list[float] = []
    count = args.step * (args.steps + 1)
    for _ in range(args.rounds):
        for library in libraries:
            holds = [0, 1] if library == "torch" else [0, 1, None]
            further = {"options": args.options} if library == "shoal" else {}
            with crew_of(library, holds, sizes, args, **further) as crew:
                before = crew.cpu_seconds()
                found = crew.ask("drive", count, to=crew.processes if library == "torch" else crew.processes[-1:])
                processor[library].append((crew.cpu_seconds() - before) / count)
                slowest = max(found, key=lambda each: each["times"][-1])
                rates[library].append(rate_of(slowest["times"], args.step))
                if "sent" in slowest:
                    sent.append(slowest["sent"] / count)
    samples = {library: size.rows * median(each) for library, each in rates.items()}
    for library, each in rates.items():
        rounds = " ".join(f"{size.rows * rate:.1f}" for rate in each)
        used = 1e3 * median(processor[library])
        print(f"  {library:<9} {samples[library]:7.1f} samples/s   cpu {used:5.1f} ms/microbatch   rounds {rounds}")
    good = []
    if "shoal" in libraries:
        tokens = 2 * size.rows * size.length * 8
        good.append(check("of the computation without a network", samples["shoal"] / samples["torch"], LEAST_OF_TORCH))
        beside = median(sent) - tokens
        good.append(
            check("sent by the driver for a microbatch", beside, MOST_BESIDE, f" bytes + {tokens}", at_most=True)
        )
    if {"shoal", "hivemind"} <= rates.keys():
        good.append(check("times as fast as hivemind", samples["shoal"] / samples["hivemind"], LEAST_OF_HIVEMIND))
    return {
        "samples_per_second": samples,
        "rounds": rates,
        "processor": processor,
        "driver_bytes": sent,
        "layers": layers,
        "met": all(good),
    }


def measure_rebalancing(args: argparse.Namespace) -> Figures:
    size = Size(length=8, width=32, hidden=8, seconds=args.wait)
    options = {**args.options, "rebalance_every": args.period}
    # The second one finds that nobody holds stage 0, which becomes the rich one.
    with crew_of("shoal", [1, "auto", None, 0, 0, 0], [size] * 2, args, options=options) as crew:
        _, mover, driver, *_ = crew.processes
        [[rich]] = crew.ask("held", to=[mover])
        if rich != 0:
            sys.exit("it moved before all others were there: give a longer --period")
        complete = time.monotonic()
        crew.tell("drive", None, args.period + 2 * args.window, to=[driver])
        while crew.ask("held", to=[mover]) == [[rich]] and time.monotonic() - complete < args.period + args.window:
            time.sleep(0.1)
        moved = time.monotonic()
        [found] = crew.answers_of([driver])
    # A slow first microbatch holds up those after it, which then come at once.
    times, first = found["times"], found["times"][2 * args.in_flight]
    before = sum(first < each <= moved for each in times) / (moved - first)
    settled = moved + args.settle
    after = sum(each > settled for each in times) / (times[-1] - settled)
    print(f"stages of {args.wait:g} s, 4 + 1 peers: {before:.2f} microbatches/s, later {after:.2f}")
    met = check("seconds until they are 3 + 2", moved - complete, args.period, " s", at_most=True)
    met &= check("times the throughput", after / before, LEAST_GAIN)
    return {"before": before, "after": after, "seconds": moved - complete, "met": met}


def measure_memory(args: argparse.Namespace) -> Figures:
    sizes = [Size(layers=args.layers)] * 2
    with crew_of("shoal", [0, 1], sizes, args, plain=1) as crew:
        plain = crew.ask("peak")
    options = {**args.options, "optimizer": "AdamW", "keep_graphs": args.keep_graphs}
    with crew_of("shoal", [0, 1, None], sizes, args, options=options) as crew:
        crew.ask("reset_peak")
        crew.ask("drive", args.step * (args.steps + 1), to=crew.processes[-1:])
        peaks = crew.ask("peak", to=crew.processes[:2])
    kept = args.in_flight * sizes[0].boundary
    print(f"two stages of {args.layers} layers, {kept / 1e6:.0f} MB of outputs under way")
    bar = (args.keep_graphs + kept + MOST_MEMORY) / 1e6
    above = [peak - before for peak, before in zip(peaks, plain, strict=True)]
    met = [
        check(f"above the same stage alone, stage {number}", each / 1e6, bar, " MB", at_most=True)
        for number, each in enumerate(above)
    ]
    return {"plain": plain, "peaks": peaks, "met": all(met)}


MEASURES = {"throughput": measure_throughput, "rebalancing": measure_rebalancing, "memory": measure_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=[*LIBRARIES, "all"], default="shoal")
    parser.add_argument("--what", choices=MEASURES, nargs="+", default=list(MEASURES))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each library")
    parser.add_argument("--step", type=int, default=64, help="microbatches in a step")
    parser.add_argument("--steps", type=int, default=3, help="after the first one, which does not count")
    parser.add_argument("--in-flight", type=int, default=8, help="microbatches that are under way at a time")
    parser.add_argument("--milliseconds", type=float, default=50, help="of computing for a stage and a microbatch")
    parser.add_argument("--wait", type=float, default=0.2, help="seconds of a stage that does not compute")
    parser.add_argument("--period", type=float, default=60, help="seconds between two looks at the stages")
    parser.add_argument("--window", type=float, default=20, help="seconds in which the throughput is looked at")
    parser.add_argument("--settle", type=float, default=3, help="seconds after the move that do not count")
    parser.add_argument("--layers", type=int, default=32, help="of the stages whose memory is measured")
    parser.add_argument("--keep-graphs", type=int, default=200_000_000, help="bytes")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further parameters of StagedModel")
    args = parser.parse_args()
    print(json.dumps({what: MEASURES[what](args) for what in args.what}))


if __name__ == "__main__":
    main()
