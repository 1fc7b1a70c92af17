"""The ``shoal plan`` command."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from shoal.base.closeable import options_from
from shoal.base.logs import counted, size
from shoal.cli import add_option, scaled, value, whole
from shoal.cli.plan import arithmetic
from shoal.cli.plan.arithmetic import Estimate, Situation, guess_layers, guess_width, improve, methods, recommend

DESCRIPTION = """\
Estimates for each way to train a transformer whether it fits, what each peer sends, and for which share of the time
cards compute. Recommends one. Connects to nobody.
"""
WIDTH = 100
# Chosen: a step of a million tokens, and about a third of what a fast card of a desktop computes at its peak.
TOKENS, SEQUENCE, FLOPS, ROUND_TRIP = 2**20, 2048, 40e12, 0.06
STAGES = ("stages, Optimizer", "stages, DiLoCo")
WELL_USED = 0.5  # chosen: with a lower share of time computing, the command looks for a change that helps
MEASURED = (
    f"an all-reduce takes {arithmetic.LINE_FACTOR} × the least time that the lines allow (benchmarks/wan.py), and "
    f"{arithmetic.ROUND_SECONDS} s (shoal demo) and {arithmetic.ROUND_TRIPS} round trips more",
    f"an encrypted line carries at most {arithmetic.FASTEST_LINE / 1e6:.0f} MB/s (benchmarks/allreduce.py)",
    f"PowerSGD: a rank of 1/{1 / arithmetic.RANK_SHARE:.0f} of the width costs 1 % of the loss (benchmarks/ranks.py)",
)
"""Constants of this project, with the programs that measure them; docs/benchmarks.md has the figures."""
ASSUMED = (
    f"{arithmetic.FLOP} FLOP per parameter and token, or {arithmetic.FLOP_REPEATED} if activations are computed again "
    "(arXiv 2001.08361)",
    "AdamW takes 16 bytes per parameter (arXiv 1910.02054); docs/training.md says what shoal adds",
    f"Optimizer averages parameters every {arithmetic.STATE_EVERY} steps",
    "stages and experts use lines as well as an all-reduce does",
)


def _positive(what: str, unit: float = 1.0) -> Callable[[str], float]:
    """A ``type`` for positive numbers of a unit, which become bytes, seconds, or FLOP."""
    return value(what, lambda text: float(text) * unit, lambda number: 0 < number < math.inf)


def add_parser(subparsers: Any) -> None:
    """Add ``plan`` to the subcommands."""
    parser = subparsers.add_parser("plan", help="find out which way to train fits", description=DESCRIPTION)
    peers, count = whole("a number from 2 on", 2, 2**40), whole("a number from 1 on", 1, 2**40)
    parameters = value("a number of parameters, such as 7e9 or 350M", scaled, lambda number: 1 <= number < 1e15)
    of_model = "of the model, such as 7e9 or 350M"
    parser.add_argument("--parameters", type=parameters, required=True, metavar="N", help=of_model)
    parser.add_argument("--peers", type=peers, required=True, metavar="N", help="that train together")
    speed = _positive("megabits per second, such as 50", 1e6 / 8)
    parser.add_argument("--uplink", type=speed, required=True, metavar="MBIT", help="of the slowest peer, in Mbit/s")
    parser.add_argument("--downlink", type=speed, metavar="MBIT", help="in Mbit/s (default: as the uplink)")
    trip = value("milliseconds, such as 60", lambda text: float(text) / 1e3, lambda number: 0 <= number < math.inf)
    of_trip = f"between peers (default: {1e3 * ROUND_TRIP:g})"
    add_option(parser, "round-trip", type=trip, default=ROUND_TRIP, metavar="MS", help=of_trip)
    gigabytes = _positive("gigabytes, such as 16", 1e9)
    parser.add_argument("--memory", type=gigabytes, required=True, metavar="GB", help="of a card")
    of_ram = "of a machine, beside its cards (default: enough)"
    parser.add_argument("--ram", type=gigabytes, default=math.inf, metavar="GB", help=of_ram)
    parser.add_argument("--cards", type=count, default=1, metavar="N", help="of each peer (default: 1)")
    speeds = parser.add_mutually_exclusive_group()
    flops = _positive("TFLOP/s, such as 40", 1e12)
    of_flops = f"what a card really computes, not its peak (default: {FLOPS / 1e12:g})"
    speeds.add_argument("--flops", type=flops, metavar="TFLOPS", help=of_flops)
    add_option(
        speeds,
        "tokens-per-second",
        type=_positive("a number of tokens per second"),
        metavar="N",
        help="that a card trains of this model, if you have measured it",
    )
    parser.add_argument("--batch", type=count, metavar="N", help="samples of a step (default: a million tokens)")
    parser.add_argument(
        "--sequence", type=count, default=SEQUENCE, metavar="N", help="tokens of a sample (default: 2048)"
    )
    layers = whole("a number of layers, at most 9999", 1, 10_000)
    parser.add_argument("--layers", type=layers, metavar="N", help="of the model (default: guessed)")
    parser.add_argument("--width", type=count, metavar="N", help="of the model (default: guessed)")
    of_boundary = "width between stages with a LowRankBoundary"
    parser.add_argument("--boundary", type=count, default=0, metavar="N", help=of_boundary)
    bits = value("32, 16, 8 or 4", int, lambda number: number in (32, 16, 8, 4))
    add_option(parser, "activation-bits", type=bits, default=8, metavar="N", help="between stages: 32, 16, 8 or 4")
    add_option(parser, "sync-every", type=count, default=100, metavar="N", help="steps of DiLoCo between two exchanges")
    parser.add_argument("--json", action="store_true", help="print the numbers for a program to read")
    parser.set_defaults(run=run)


def situation_of(arguments: argparse.Namespace) -> Situation:
    """What the user has told, with guesses for the rest.

    Raises:
        ValueError: the numbers contradict each other.
    """
    parameters = arguments.parameters
    layers = arguments.layers or guess_layers(parameters, arguments.width)
    width = arguments.width or guess_width(parameters, layers)
    least = arithmetic.LAYER * layers * width**2
    if (arguments.layers or arguments.width) and least > 2 * parameters:
        raise ValueError(
            f"{layers} layers of width {width} have about {words(least)} parameters, and --parameters says "
            f"{words(parameters)}: correct --layers, --width or --parameters"
        )
    batch = arguments.batch or max(1, TOKENS // arguments.sequence, arguments.peers)
    if batch < arguments.peers:
        raise ValueError(f"--batch {batch} is less than a sample for each of {arguments.peers} peers: raise it")
    if arguments.boundary > width:
        raise ValueError(f"--boundary {arguments.boundary} is wider than the model, which is {width} wide: lower it")
    flops = arguments.flops or FLOPS
    if arguments.tokens_per_second:
        flops = arguments.tokens_per_second * arithmetic.FLOP * parameters
    return options_from(
        Situation,
        vars(arguments),
        layers=layers,
        width=width,
        batch=batch,
        flops=flops,
        downlink=arguments.downlink or arguments.uplink,
        activation_bits=4.25 if arguments.activation_bits == 4 else arguments.activation_bits,
    )


def words(number: float) -> str:
    """A number in words, such as 7 billion."""
    for factor, unit in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"


def span(seconds: float) -> str:
    """A length of time, with two or three digits."""
    for limit, factor, unit in (
        (1, 1e-3, "ms"),
        (100, 1, "s"),
        (6000, 60, "min"),
        (360000, 3600, "h"),
        (9e7, 86400, "d"),
    ):
        if seconds < limit:
            return f"{seconds / factor:.{'1f' if seconds / factor < 9.95 else '0f'}} {unit}"
    return f"{seconds / 31557600:.0f} y"


def percent(share: float) -> str:
    return f"{100 * share:.{'1f' if share < 0.0995 else '0f'}} %"


def row(each: Estimate, best: Estimate | None) -> str:
    """A line of the table."""
    mark = "►" if each is best else " "
    fits = f"no: {each.problem}" if each.problem else ("yes" if each.is_same_model else "another model")
    figures = (size(each.card), size(each.ram), size(each.sent), span(each.step))
    return f"{mark} {each.name:<20} {each.layout:<9}{_cells(*figures)} {percent(each.share):>9}  {fits}"


def _cells(*texts: str) -> str:
    return "".join(f"{text:>9}" for text in texts)


def reason(found: Sequence[Estimate], best: Estimate | None) -> str:
    """What is recommended, and why in a sentence; or why nothing is."""
    if best is None:
        closest = min((each for each in found if each.name in STAGES), key=lambda each: int(each.layout.split()[0]))
        return f"No way fits. Closest is {closest.name}: {closest.problem}."
    fitting = [each for each in found if not each.problem and each.is_same_model]
    if fitting[0].name in STAGES:
        count, _, holders = best.layout.split()
        why = f"No peer can hold the model, but {count} stages can, each on {counted(int(holders), 'card')} or more"
    elif best is fitting[0]:
        where = "The cards of a peer together hold" if best.name.startswith("sharded") else "A card holds"
        why = f"{where} the model, and no other way that fits is much faster"
    else:
        why = f"A step takes {span(best.step)}, and {span(fitting[0].step)} with {fitting[0].name}"
    return f"Recommended: {best.name}. {why}."


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    situation = situation_of(arguments)
    found = methods(situation)
    best = recommend(found)
    better = None if best is None or best.share >= WELL_USED else improve(situation, best)
    if arguments.json:
        told = {
            "situation": asdict(situation) | {"ram": None if math.isinf(situation.ram) else situation.ram},
            "ways": [{**asdict(each), "share": each.share, "fits": not each.problem} for each in found],
            "recommended": best and best.name,
            "reason": reason(found, best),
            "better": better and {"option": better[0], "way": better[1].name, "share": better[1].share},
            "measured": MEASURED,
            "assumed": ASSUMED,
        }
        print(json.dumps(told))
        return 0
    show(describe(situation, arguments), found, best, better)
    return 0


def describe(situation: Situation, arguments: argparse.Namespace) -> str:
    """What the table is computed from, with what was guessed."""
    of_model = "" if arguments.layers and arguments.width else ", guessed"
    of_card = "" if arguments.flops or arguments.tokens_per_second else ", guessed"
    cards = "a card" if situation.cards == 1 else f"{situation.cards} cards"
    up, down = (f"{8e-6 * speed:g} Mbit/s" for speed in (situation.uplink, situation.downlink))
    line = up if up == down else f"{up} up and {down} down"
    return (
        f"{words(situation.parameters)} parameters ({situation.layers} layers, {situation.width} wide{of_model}) on "
        f"{situation.peers} peers, each with {cards} of {situation.memory / 1e9:g} GB "
        f"({situation.flops / 1e12:.3g} TFLOP/s{of_card}) and a line of {line}, {1e3 * situation.round_trip:g} ms. "
        f"A step: {situation.batch} samples of {situation.sequence} tokens. DiLoCo exchanges every "
        f"{situation.sync_every} steps. Activations have {situation.activation_bits:g} bits."
    )


def show(
    described: str,
    found: Sequence[Estimate],
    best: Estimate | None,
    better: tuple[str, Estimate] | None,
) -> None:
    """Print the answer."""
    say(described)
    print()
    print(f"{'':<32}{_cells('card', 'RAM', 'sent', 'a step')} computing  fits")
    print(*(row(each, best) for each in found), sep="\n")
    print()
    say("card: of each card; RAM: of each machine; sent: by a peer for a step; computing: share of the time")
    say("sharded: over the cards of a peer, with FSDP2; 10 × 2: ten stages, each on two cards")
    print()
    say(reason(found, best))
    if better is not None and best is not None:
        option, after = better
        how = " (LowRankBoundary, which costs loss)" if option.startswith("--boundary") else ""
        say(f"With {option}{how}: {after.name}, computing {percent(after.share)}.")
    print()
    say("Measured:", *MEASURED)
    say("Assumed:", *ASSUMED)


def say(text: str, *points: str) -> None:
    """Print a paragraph, and a list."""
    print(textwrap.fill(text, WIDTH))
    for point in points:
        print(textwrap.fill(point, WIDTH, initial_indent="- ", subsequent_indent="  "))
