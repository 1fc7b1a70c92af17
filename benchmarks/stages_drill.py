"""Whether a model in stages learns as one process does, also while its peers die.

    python benchmarks/stages_drill.py
    python benchmarks/stages_drill.py --kill-every 10 --seconds 180
    sudo python benchmarks/stages_drill.py --laboratory --store laboratory.json --picture laboratory.png

Real processes: three stages with two peers each, and two drivers, train the demo's language model for ``--steps``
steps. With ``--kill-every``, a stage peer is killed (SIGKILL) and replaced every so many seconds, one stage after the
other, until the steps are made and ``--seconds`` are over. Then one process trains without a network, with as many
samples, first with the same ones. Printed are the loss of both on text held out, and the longest step beside the
median.

``--laboratory`` is a longer drill with a larger model: ten million parameters in four stages of two peers, each on a
host of its own with a line of 50 Mbit/s and 60 ms (see wide_area.py). Two of the eight also drive. One after the other
is killed, these two as well, one each minute for twenty minutes. What a killed driver had under way comes again. Any
option can be given besides.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from crew import Crew
from stages import check
from stages_drill_peer import Brought, Plan, Stage, train_alone
from wide_area import WideArea

MOST_OTHER_LOSS, MOST_OTHER_LOSS_WITH_DEATHS = 0.01, 0.02
STALL_LIMIT_SECONDS = 120
"""A step that takes longer has hung."""
CODEC = "BlockwiseQuantization"
LABORATORY = {
    "megabits": 50.0,
    "stages": 4,
    "layers": 8,
    "width": 320,
    "heads": 5,
    "rows": 16,
    "step": 16,
    "steps": 0,
    "seconds": 1200.0,
    "kill_every": 60.0,
    "alone": 1,
    "learning_rate": 5e-4,
    "options": {
        "compression": CODEC,
        "gradient_compression": CODEC,
        "optimizer_opts": {"grad_compression": "Float16Compression", "average_state_every": 10},
    },
}


@dataclass
class Drill:
    """Peers of which some die, and what is found about them."""

    crew: Crew
    plan: Plan
    holds: list[int | None]
    stories: list[list[Brought]] = field(default_factory=list)
    """Of each driver, all its processes together."""
    seen: list[int] = field(default_factory=list)
    """What of it is of the present process."""
    deaths: list[float] = field(default_factory=list)
    """Their moments."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of those that have died."""

    def join(self, index: int, addresses: list[str]) -> list[str]:
        """Let a process take part."""
        to = [self.crew.processes[index]]
        [found] = self.crew.ask("open", addresses, to=to)
        self.crew.ask("join", self.holds[index], to=to)
        return list(found)

    def start(self, driver: int) -> None:
        """Let a process drive."""
        done = sum(each.samples for each in self.stories[driver]) // self.plan.rows
        self.crew.ask("start", done, to=[self.crew.processes[driver]])
        self.seen[driver] = 0

    def look(self) -> None:
        """Ask the drivers what they have done."""
        for driver in range(self.plan.drivers):
            self.look_at(driver)

    def look_at(self, driver: int) -> None:
        [found] = self.crew.ask("progress", self.seen[driver], to=[self.crew.processes[driver]])
        self.stories[driver] += [Brought(*each) for each in found]
        self.seen[driver] += len(found)

    def kill(self, index: int) -> None:
        """Kill a peer, and start another one in its place."""
        is_driver = index < self.plan.drivers
        [counts] = self.crew.ask("counts", to=[self.crew.processes[index]])
        self.counts += _flat(counts)
        if is_driver:
            self.look_at(index)
        self.deaths.append(time.monotonic())
        self.crew.replace(index)
        [addresses] = self.crew.ask("addresses", to=[self.crew.processes[index - 1]])
        self.join(index, addresses)
        if is_driver:
            self.start(index)

    @property
    def brought(self) -> list[Brought]:
        """All microbatches in the order in which they came back."""
        return sorted(itertools.chain(*self.stories))

    def begins(self) -> dict[int, float]:
        """When each step was seen first."""
        found: dict[int, float] = {}
        for each in self.brought:
            if each.step > max(found, default=-1):
                found[each.step] = each.moment
        return found


def _flat(counts: dict[str, Any], within: str = "") -> Counter[str]:
    """Counts of counts as counts with longer names."""
    found = Counter[str]()
    for name, value in counts.items():
        found.update(_flat(value, f"{within}{name}: ") if isinstance(value, dict) else {within + name: value})
    return found


def drill(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Train in stages."""
    drives_only = [] if args.laboratory else [None] * args.drivers
    holds = [*drives_only, *(stage for _ in range(args.peers) for stage in range(plan.stages))]
    with ExitStack() as stack:
        area = stack.enter_context(WideArea(len(holds), args.megabits, args.round_trip)) if args.megabits else None
        arguments = {"plan": json.dumps(plan), "options": json.dumps(args.options)}
        crew = stack.enter_context(
            Crew("stages_drill_peer.py", "shoal", len(holds), area.hosts if area else (), **arguments)
        )
        made = Drill(crew, plan, holds, [[] for _ in range(plan.drivers)], [0] * plan.drivers)
        addresses = made.join(0, [])
        for index in range(1, len(holds)):
            made.join(index, addresses)
        own_before = time.process_time()
        before = sum(map(_flat, crew.ask("counts")), Counter[str]())
        for driver in range(plan.drivers):
            made.start(driver)
        began = time.monotonic()
        victims = itertools.cycle(range(len(drives_only), len(holds)))
        while max(made.begins(), default=0) < args.steps or time.monotonic() - began < args.seconds:
            time.sleep(0.5)
            made.look()
            begins = made.begins()
            stalled = time.monotonic() - max([began, *begins.values()])
            if stalled > STALL_LIMIT_SECONDS:
                step = max(begins, default=0)
                sys.exit(
                    f"step {step} has taken {stalled:.0f} s, after {len(made.deaths)} deaths: {crew.ask('counts')}"
                )
            if args.kill_every and time.monotonic() - (made.deaths or [began])[-1] >= args.kill_every:
                made.kill(next(victims))
        seconds = time.monotonic() - began
        own = time.process_time() - own_before
        counts = sum(map(_flat, crew.ask("counts")), made.counts)
        counts.subtract(before)
        drivers = crew.processes[: plan.drivers]
        crew.ask("stop", to=drivers)
        made.look()
        [loss] = crew.ask("evaluate", to=drivers[:1])
    begins = made.begins()
    lengths = [
        (after - before) / (later - earlier) for (earlier, before), (later, after) in itertools.pairwise(begins.items())
    ]
    return {
        "loss": loss,
        "steps": max(begins),
        "deaths": [moment - began for moment in made.deaths],
        "median": median(lengths),
        "longest": max(lengths),
        "seconds": seconds,
        "brought": sum(each.samples for each in made.brought),
        "curve": [(each.moment - began, each.samples, each.loss) for each in made.brought],
        "peers": len(holds),
        "cores": os.cpu_count(),
        "wire": own if area else 0.0,
        "counts": counts,
    }


def tell(found: dict[str, Any]) -> None:
    """Print what the peers did with their time and their lines."""
    counts, seconds, peers = Counter(found["counts"]), found["seconds"], found["peers"]
    all_cores = found["cores"] * seconds
    computing, processor = (100 * counts[name] / all_cores for name in ("computing", "processor"))
    print(
        f"  a peer computes its stage {100 * counts['computing'] / peers / seconds:.1f} % of the time, of at most "
        f"{100 * found['cores'] / peers:.3g} %; of all processor time, stages have {computing:.0f} %, all else of the "
        f"peers {processor - computing:.0f} %, the hosts and lines {100 * found['wire'] / all_cores:.0f} %"
    )
    steps = peers * found["steps"]
    stages, averaging = (counts[f"sent_by_service: {name}"] for name in ("StageService", "AveragerNode"))
    print(
        f"  a peer sends {8 * counts['bytes_sent'] / peers / seconds / 1e6:.1f} Mbit/s, "
        f"{counts['bytes_sent'] / steps / 1e6:.2f} MB for each step: {stages / steps / 1e6:.2f} MB to other stages, "
        f"{averaging / steps / 1e6:.2f} MB to its own"
    )
    names = ("microbatches_done", "microbatches_dropped", "microbatches_resent: late", "microbatches_resent: lost")
    totals = {name: sum(n for each, n in counts.items() if each.startswith(name)) for name in (*names, "hops_repaired")}
    print("  " + ", ".join(f"{name} {total}" for name, total in totals.items()))


def draw(found: dict[str, Any], alone: list[float], plan: Plan, path: Path) -> None:
    """Draw the losses against samples into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from shoal.cli.demo.report import COLOURS, GREY

    def averaged(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, ...], ...]:
        """About a hundred of them."""
        size = max(1, len(points) // 100)
        parts = (points[first : first + size] for first in range(0, len(points), size))
        return tuple(zip(*(map(fmean, zip(*part, strict=True)) for part in parts), strict=True))

    moments, samples, losses = zip(*found["curve"], strict=True)
    totals = list(itertools.accumulate(samples))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    of_step = [(number * plan.step * plan.rows, loss) for number, loss in enumerate(alone, start=1)]
    axes.plot(*averaged(of_step), color=COLOURS[1], linewidth=2.5, label="one process")
    label = f"{plan.stages} stages, {found['peers']} peers"
    axes.plot(*averaged(list(zip(totals, losses, strict=True))), color=COLOURS[0], linewidth=1.2, label=label)
    for number, death in enumerate(found["deaths"]):
        at = sum(count for moment, count in zip(moments, samples, strict=True) if moment <= death)
        axes.axvline(at, color=GREY, linestyle=":", linewidth=0.8, label=None if number else "a peer is killed")
    axes.set_xlabel("samples that were brought through")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laboratory", action="store_true", help="the long drill on hosts of their own")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-every", type=float, default=0, metavar="SECONDS", help="0: nobody is killed")
    parser.add_argument("--seconds", type=float, default=0, help="for which they train at least")
    parser.add_argument("--megabits", type=float, default=0, help="that each host can send per second; 0: loopback")
    parser.add_argument("--round-trip", type=float, default=0.060, help="seconds between any two hosts and back")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3, help="of the whole model")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--peers", type=int, default=2, help="of each stage")
    parser.add_argument("--drivers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="samples of a microbatch")
    parser.add_argument("--step", type=int, default=8, help="microbatches in a step")
    parser.add_argument(
        "--alone", type=int, default=3, help="how often one process trains, each time with other samples"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the parameters")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further parameters of StagedModel")
    parser.add_argument("--store", type=Path, help="results are kept in this file, and not measured again")
    parser.add_argument("--picture", type=Path, help="draw the losses into this PNG file")
    if parser.parse_args().laboratory:
        parser.set_defaults(**LABORATORY)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(*(getattr(args, name) for name in Plan._fields))
    known = json.loads(args.store.read_text(encoding="utf-8")) if args.store and args.store.exists() else {}

    def measure(what: str, how: Callable[[], Any]) -> Any:
        if what not in known:
            known[what] = how()
            if args.store:
                args.store.write_text(json.dumps(known), encoding="utf-8")
        return known[what]

    found = measure("found", lambda: drill(args, plan))
    steps = round(found["brought"] / (plan.step * plan.rows))
    # Other samples of the same text make some difference to the loss.
    alone = [
        measure(f"alone {number}", functools.partial(train_alone, plan, steps, number * steps * plan.step))
        for number in range(args.alone)
    ]
    losses, curves = zip(*alone, strict=True)
    mean = fmean(losses)
    parameters = sum(each.numel() for number in range(plan.stages) for each in Stage(number, plan).parameters())
    print(
        f"{parameters / 1e6:.2f} million parameters in {plan.stages} stages of {args.peers} peers, {plan.drivers} "
        f"drivers: {found['steps']} steps, {found['brought']} samples in {found['seconds']:.0f} s, "
        f"{len(found['deaths'])} deaths; loss {found['loss']:.4f}, of one process in {len(curves[0])} steps {mean:.4f} "
        f"({' '.join(f'{each:.4f}' for each in losses)})"
    )
    tell(found)
    if args.picture:
        draw(found, curves[0], plan, args.picture)
    bar = MOST_OTHER_LOSS_WITH_DEATHS if found["deaths"] else MOST_OTHER_LOSS
    good = [
        check("other loss", 100 * abs(found["loss"] / mean - 1), 100 * bar, " %", at_most=True),
        check("longest step", found["longest"], 3 * found["median"] + 10, " s", at_most=True),
    ]
    brief = {name: value for name, value in found.items() if name != "curve"}
    print(json.dumps({**vars(args), **brief, "alone": losses, "met": all(good)}, default=str))


if __name__ == "__main__":
    main()
