"""Which loss low-communication training reaches, with how many bytes, and how long it takes over slow, long links.

    python benchmarks/low_communication.py
    python benchmarks/low_communication.py --modes synchronous "H=30, 4 bits" --seeds 1 2 3 --picture loss.png
    sudo python benchmarks/low_communication.py --megabits 100 --round-trip 0.060 --modes synchronous "H=30, 4 bits"

Real processes train the demo's byte-level transformer from the same parameters, each on its own share of the text, the
same number of steps with the same batches in all modes. The loss is that on text which nobody has trained on. Counted
is what a peer sends: the encoded values, and beside it every byte of its messages, whatever for. Without ``--megabits``
the peers speak over loopback; the seconds are then those that a wide area would take by the formula below.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

from crew import JoinedCrew
from wide_area import WideArea

FOUR_BITS = {"sync_every": 30, "compression": "4 bits", "outer": (0.9, 0.5)}
LATE = {**FOUR_BITS, "fragment_sync_delay": 15}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"kind": "synchronous"},
    "H=10": {"kind": "diloco", "options": {"sync_every": 10, "compression": "float16", "outer": (0.9, 0.5)}},
    "H=30, 4 bits": {"kind": "diloco", "options": FOUR_BITS},
    "streaming": {
        "kind": "diloco",
        "options": {
            "sync_every": 30,
            "compression": "4 bits",
            "outer": (0.7, 0.9),
            "fragments": 3,
            "fragment_sync_delay": 2,
            "fragment_update_alpha": 0.5,
        },
    },
    "sparse": {"kind": "diloco", "options": {"sync_every": 10, "compression": "top-k"}},
    "NoLoCo": {
        "kind": "diloco",
        # Only pairs wait for each other. Here all keep in step, as they would on machines of the same speed.
        "report_every": 10,
        "options": {
            "sync_every": 10,
            "compression": "float16",
            "average": "parameters",
            "averager_opts": {"target_group_size": 2},
        },
    },
    "streaming, late": {
        "kind": "diloco",
        "options": {
            "sync_every": 30,
            "compression": "4 bits",
            "outer": (0.9, 0.5),
            "fragments": 3,
            "fragment_sync_delay": 15,
        },
    },
    "late, rebase": {"kind": "diloco", "options": LATE},
    "late, half": {"kind": "diloco", "options": {**LATE, "fragment_update_alpha": 0.5}},
    "alone": {"kind": "alone"},
}
MODES_OF_TABLE = [name for name in MODES if name != "streaming, late"]
# By how much the loss may be above the synchronous one, and how many times fewer bytes are sent.
BARS = {
    "H=10": (0.055, 10),
    "H=30, 4 bits": (0.07, 70),
    "streaming": (0.085, 70),
    "sparse": (0.10, 300),
    "NoLoCo": (0.075, 14),
    "late, rebase": (0.09, 70),
}
REPORT_EVERY = 60

# Of the wide area whose seconds are estimated.
BYTES_PER_SECOND, ROUND_TRIP, SECONDS_PER_STEP, TRIPS_PER_ROUND = 12.5e6, 0.060, 0.02, 4


class LanguageCrew(JoinedCrew):
    """Peers that know each other when the block begins."""

    def _get_ready(self) -> None:
        super()._get_ready()
        self.ask("appear")
        self.ask("meet")


def measure(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one mode."""
    mode, peers = MODES[name], 1 if MODES[name]["kind"] == "alone" else args.peers
    curve, payload, seconds = [], 0.0, 0.0
    with ExitStack() as stack:
        hosts = []
        if args.megabits:
            hosts = stack.enter_context(WideArea(peers, args.megabits, args.round_trip)).hosts
        told = {"mode": json.dumps(mode), "seed": seed, "steps": args.steps}
        crew = stack.enter_context(LanguageCrew("low_communication_peer.py", "shoal", peers, hosts, **told))
        every = mode.get("report_every", REPORT_EVERY)
        for until in [*range(every, args.steps, every), args.steps]:
            answers = crew.ask("train", until)
            seconds += max(answer["seconds"] for answer in answers)
            payload += mean(sum(each["bytes"] for each in answer["rounds"]) for answer in answers)
            is_end = until == args.steps
            if until % REPORT_EVERY and not is_end:
                continue
            found = crew.ask("measure", is_end, to=None if is_end else crew.processes[:1])
            curve.append((until, payload, mean(each["loss"] for each in found), seconds))
    rounds = [each for answer in found for each in answer["rounds"]]
    made = len(rounds) / peers
    payload = sum(each["bytes"] for each in rounds) / peers
    curve[-1] = (args.steps, payload, *curve[-1][2:])
    delay = mode.get("options", {}).get("fragment_sync_delay", 0)
    per_round = TRIPS_PER_ROUND * ROUND_TRIP + payload / max(1.0, made) / BYTES_PER_SECOND - delay * SECONDS_PER_STEP
    return {
        "loss": curve[-1][2],
        "payload": payload,
        "sent": mean(each["sent"] for each in found),
        "rounds": made,
        "complete": mean(each["peers"] == max(e["peers"] for e in rounds) for each in rounds) if rounds else 1.0,
        "largest": max((each["bytes"] for each in rounds), default=0),
        "same": len({tuple(each["bits"]) for each in found}) == 1,
        "estimate": args.steps * SECONDS_PER_STEP + made * max(0.0, per_round),
        "seconds": seconds,
        # Of rounds in the middle of training: how long they took, and the step in which they were applied.
        "round": median(each.get("seconds", each["step"]) for each in rounds) if rounds else 0.0,
        "step": median(each["step"] for each in rounds if each["step"]) if rounds else 0.0,
        "curve": curve,
        "values": found[0]["values"],
    }


def measure_once(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one mode, unless the store has the result already."""
    key = [name, seed, args.peers, args.steps, args.megabits, args.round_trip]
    lines = args.store.read_text(encoding="utf-8").splitlines() if args.store and args.store.exists() else []
    for known, result in map(json.loads, lines):
        if known == key:
            return dict(result)
    result = measure(name, seed, args)
    if args.store:
        with args.store.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, result]) + "\n")
    return result


def tell(name: str, results: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    """Print a line about one mode."""
    loss, payload = (mean(each[key] for each in results) for key in ("loss", "payload"))
    known, best = (mean(each[key] for each in base) for key in ("loss", "payload"))
    fewer = best / payload if payload else 0.0
    overhead = mean(each["sent"] - each["payload"] for each in results)
    line = (
        f"  {name:<13} loss {loss:.4f} ({100 * (loss / known - 1):+5.1f} %)  payload {payload / 1e6:7.2f} MB "
        f"({fewer:5.1f} x fewer), largest round {max(each['largest'] for each in results) / 1e3:6.0f} kB  "
        f"beside it {overhead / 1e3:6.0f} kB  {mean(each['rounds'] for each in results):4.0f} rounds, "
        f"{100 * mean(each['complete'] for each in results):3.0f} % complete  "
        f"about {mean(each['estimate'] for each in results):4.0f} s, "
        f"took {mean(each['seconds'] for each in results):4.0f} s"
    )
    if name in BARS:
        limit, times = BARS[name]
        is_met = loss <= known * (1 + limit) and round(fewer, 1) >= times
        line += f"  {'met' if is_met else 'MISSED'}: {100 * limit:g} %, {times} x"
    if MODES[name].get("options", {}).get("average") != "parameters" and not all(each["same"] for each in results):
        line += "  OUTER PARAMETERS DIFFER"
    print(line, flush=True)


def draw(results: dict[str, list[dict[str, Any]]], path: Path, *, is_wide: bool) -> None:
    """Draw the loss against bytes, and against seconds, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from shoal.cli.demo.report import COLOURS, MARKERS

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    by_bytes, by_time = figure.subplots(2, 1)
    colours, markers = (*COLOURS, "#000000", "#8c510a"), (*MARKERS, "*", "<")
    for (name, runs), colour, marker in zip(results.items(), colours, markers, strict=False):
        run = runs[0]
        steps, sent, losses, seconds = zip(*run["curve"], strict=True)
        style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.2, "label": name}
        if run["payload"]:
            by_bytes.plot([each / 1e6 for each in sent], losses, **style)
        else:
            by_bytes.axhline(losses[-1], color=colour, linestyle="--", linewidth=1, label=name)
        by_time.plot(seconds if is_wide else [run["estimate"] * each / steps[-1] for each in steps], losses, **style)
    by_bytes.set_xscale("log")
    by_time.set_xscale("log")
    by_bytes.set_xlabel("megabytes that a peer has sent")
    by_time.set_xlabel("seconds" if is_wide else "seconds on a wide area, estimated")
    for axes in (by_bytes, by_time):
        axes.set_ylabel("held-out loss, nats per byte")
        axes.set_ylim(top=3.0)
        axes.grid(alpha=0.3)
    by_bytes.legend(loc="upper right", ncols=2)
    figure.savefig(path, dpi=120)


def options() -> argparse.ArgumentParser:
    """What all programs that measure modes are told."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=420, help="that each peer makes")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--round-trip", type=float, default=0.060, help="seconds between any two peers and back")
    parser.add_argument("--store", type=Path, help="results are kept in this file, and not measured again")
    parser.add_argument("--picture", type=Path, help="draw the losses into this PNG file")
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[options()]
    )
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES_OF_TABLE)
    parser.add_argument("--megabits", type=float, default=0, help="that each peer can send per second; 0: loopback")
    args = parser.parse_args()
    print(f"{args.peers} peers, {args.steps} steps each, seeds {args.seeds}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in args.modes:
        results[name] = [measure_once(name, seed, args) for seed in args.seeds]
        tell(name, results[name], results.get("synchronous", results[name]))
    if args.picture:
        draw(results, args.picture, is_wide=bool(args.megabits))
    print(json.dumps({**vars(args), "results": results}, default=str))


if __name__ == "__main__":
    main()
