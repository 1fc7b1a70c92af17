"""Whether a model in stages learns as one process does, also while its peers die.

    python benchmarks/stages_drill.py
    python benchmarks/stages_drill.py --kill-every 10 --seconds 180

Real processes: three stages with two peers each, and two drivers, train the demo's language model for ``--steps``
steps. With ``--kill-every``, a stage peer is killed (SIGKILL) and replaced every so many seconds, one stage after the
other, until the steps are made and ``--seconds`` are over. Then one process trains without a network, with as many
samples, first with the same ones. Printed are the loss of both on text held out, and the longest step beside the
median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from statistics import fmean, median
from typing import Any

import torch
from crew import Crew
from stages import check
from stages_drill_peer import STAGES, train_alone

MOST_OTHER_LOSS, MOST_OTHER_LOSS_WITH_DEATHS = 0.01, 0.02
STALL_LIMIT_SECONDS = 120
"""A step that takes longer has hung."""


def drill(args: argparse.Namespace) -> dict[str, Any]:
    """Train in stages."""
    holds = [None] * args.drivers + [stage for stage in range(STAGES) for _ in range(args.peers)]
    arguments = {"drivers": args.drivers, "rows": args.rows, "step": args.step, "seed": args.seed}
    arguments["options"] = json.dumps(args.options)
    with Crew("stages_drill_peer.py", "shoal", len(holds), **arguments) as crew:
        drivers = crew.processes[: args.drivers]
        [addresses] = crew.ask("open", to=drivers[:1])
        for process, stage in zip(crew.processes, holds, strict=True):
            crew.ask("join", addresses, stage, to=[process])
        crew.ask("start", to=drivers)
        began = last_kill = time.monotonic()
        victims = itertools.cycle(
            args.drivers + stage * args.peers + peer for peer in range(args.peers) for stage in range(STAGES)
        )
        kills, step = 0, 0
        while step < args.steps or time.monotonic() - began < args.seconds:
            time.sleep(0.2)
            found = crew.ask("progress", to=drivers)
            step = min(each["step"] for each in found)
            stalled = time.monotonic() - max(began, *(each["since"] for each in found))
            if stalled > STALL_LIMIT_SECONDS:
                sys.exit(f"step {step} has taken {stalled:.0f} s by now, after {kills} deaths: {crew.ask('counts')}")
            if args.kill_every and time.monotonic() - last_kill >= args.kill_every:
                last_kill, kills, victim = time.monotonic(), kills + 1, next(victims)
                crew.ask("join", addresses, holds[victim], to=[crew.replace(victim)])
        times = crew.ask("stop", to=drivers)
        [loss] = crew.ask("evaluate", to=drivers[:1])
        brought = sum(each["brought"] for each in crew.ask("progress", to=drivers))
        counts = crew.ask("counts")
    moments = [moment for _, moment in times[0]]
    steps = max(each[-1][0] for each in times)
    lengths = [
        (after - before) / (later - earlier) for (earlier, before), (later, after) in itertools.pairwise(times[0])
    ]
    return {
        "loss": loss,
        "steps": steps,
        "kills": kills,
        "median": median(lengths),
        "longest": max(lengths),
        "seconds": moments[-1] - moments[0],
        "brought": brought,
        "counts": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-every", type=float, default=0, metavar="SECONDS", help="0: nobody is killed")
    parser.add_argument("--seconds", type=float, default=0, help="for which they train at least")
    parser.add_argument("--peers", type=int, default=2, help="of each stage")
    parser.add_argument("--drivers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="samples of a microbatch")
    parser.add_argument("--step", type=int, default=8, help="microbatches in a step")
    parser.add_argument(
        "--alone", type=int, default=3, help="how often one process trains, each time with other samples"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the parameters")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further parameters of StagedModel")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = drill(args)
    steps_alone = round(found["brought"] / (args.step * args.rows))
    figures = steps_alone, args.drivers, args.rows, args.step, args.seed
    # Other samples of the same text make some difference to the loss.
    losses = [train_alone(*figures, skipped=number * steps_alone * args.step) for number in range(args.alone)]
    alone = fmean(losses)
    print(
        f"{STAGES} stages of {args.peers} peers, {args.drivers} drivers: {found['steps']} steps, {found['brought']} "
        f"samples in {found['seconds']:.0f} s, {found['kills']} deaths; loss {found['loss']:.4f}, of one process in "
        f"{steps_alone} steps {alone:.4f} ({' '.join(f'{each:.4f}' for each in losses)})"
    )
    bar = MOST_OTHER_LOSS_WITH_DEATHS if found["kills"] else MOST_OTHER_LOSS
    good = [
        check("other loss", 100 * abs(found["loss"] / alone - 1), 100 * bar, " %", at_most=True),
        check("longest step", found["longest"], 3 * found["median"] + 10, " s", at_most=True),
    ]
    print(json.dumps({**vars(args), **found, "alone": losses, "met": all(good)}))


if __name__ == "__main__":
    main()
