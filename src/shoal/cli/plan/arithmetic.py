"""What each way to train needs, and how long its steps take, from sizes and lines alone.

All ways make the same step: ``batch`` samples of all peers together. Times are estimates for equal peers that train a
transformer in mixed precision with AdamW. Units are bytes, seconds, FLOP, and numbers of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# Forward and backward pass, for each parameter and token (Kaplan et al. 2020, arXiv 2001.08361). It is 8 if activations
# do not fit, and the forward pass is made again on the way back.
FLOP, FLOP_REPEATED = 6, 8
# A layer of width d has 12 d² parameters, of which 8 d² are in its feed-forward network (ibid., section 2.1).
LAYER, FEED_FORWARD = 12, 2 / 3
# Width divided by layers: 4096 / 32 in LLaMA-7B (arXiv 2302.13971).
ASPECT = 128
# Activations of a layer, for each token and unit of width: 34 bytes for the way back (Korthikanti et al. 2022,
# arXiv 2205.05198, without attention scores, which fused kernels do not keep), or its 16-bit input alone.
GRAPH, INPUT = 34, 2
# Share of a card; the rest is for CUDA, workspaces and fragmentation. Chosen.
USABLE = 0.9

# Measured (docs/benchmarks.md): how many times the least possible time an all-reduce over slow, long lines takes; bytes
# per second of an encrypted one on a fast network; what finding each other and stepping add for four peers.
LINE_FACTOR, FASTEST_LINE, ROUND_SECONDS = 1.04, 200e6 / 0.28, 0.10
# One to form the group, and one to end the round together (benchmarks/README.md).
ROUND_TRIPS = 2
# ``average_state_every`` of all ways with Optimizer, as in benchmarks/low_rank.py.
STATE_EVERY = 100
# Rank of PowerSGD divided by the width of the model: costs 1 % of the loss (docs/gradients.md).
RANK_SHARE = 1 / 12
EXPERTS_PER_TOKEN = 2  # chosen
# The forward call of an expert sends inputs and returns outputs; the backward call sends inputs and gradients, and
# returns gradients.
TENSORS_OF_A_CALL = 5
# The first way that has this share of the speed of the fastest one is recommended: exact averages are worth a fifth.
# Chosen.
NEARLY = 0.8


@dataclass(frozen=True)
class Situation:
    """The model, and what there is to train it."""

    parameters: float
    layers: int
    width: int
    sequence: int
    """Tokens of a sample."""
    batch: int
    """Samples of all peers in one step."""
    peers: int
    cards: int
    """Cards of each peer."""
    memory: float
    """Bytes of a card."""
    flops: float
    """What a card really computes, in FLOP/s."""
    uplink: float
    """Bytes per second, as is ``downlink``."""
    downlink: float
    round_trip: float
    ram: float = math.inf
    """Bytes that a machine has for training, apart from its cards."""
    sync_every: int = 100
    """Steps of ``DiLoCo`` between two exchanges."""
    boundary: int = 0
    """Values for each token that go from stage to stage; 0: as many as the model is wide."""
    activation_bits: float = 8
    """Of each value that goes from stage to stage, or to an expert."""

    @property
    def usable(self) -> float:
        """Bytes of a card that training may take."""
        return USABLE * self.memory


class MemoryUse(NamedTuple):
    """Bytes for each parameter: on the card, in the memory of the machine, and the option that makes it so."""

    card: float
    ram: float
    option: str = ""


# Adam in mixed precision takes 16 bytes (Rajbhandari et al. 2020, arXiv 1910.02054). What Optimizer adds is in
# docs/training.md, "Memory", what DiLoCo with 4 bits adds in docs/low-communication.md, and both, sharded, in
# docs/sharded.md.
OPTIMIZER = (MemoryUse(20, 8), MemoryUse(12, 16, "offload"))
POWER_SGD = (MemoryUse(20, 16), MemoryUse(12, 24, "offload"))
DILOCO = (MemoryUse(16, 20),)
SHARDED_OPTIMIZER = (MemoryUse(12, 24),)
SHARDED_DILOCO = (MemoryUse(16, 20),)
EXPERT = 16


class Averaging(NamedTuple):
    """How peers average."""

    bits: float
    """Of a value on the way out, and of its average on the way back, together."""
    sync_every: int | None = None
    """Of ``DiLoCo``; ``None``: in every step, with ``Optimizer``."""
    values: float = 1.0
    """Values that are sent for each parameter."""


FLOAT_16, EIGHT_BITS = Averaging(32), Averaging(16)
# A matrix (m, n) sends rank · (m + n) values: 16 · rank · width in a layer of 12 · width².
LOW_RANK = Averaging(32, values=16 / LAYER * RANK_SHARE)
FOUR_BITS = 4.25 + 8


@dataclass(frozen=True)
class Estimate:
    """What a way to train takes."""

    name: str
    layout: str
    """Stages and holders of each, cards, or an option."""
    card: float
    """Bytes on each card."""
    ram: float
    """Bytes in the memory of each machine."""
    sent: float
    """Bytes that each peer sends for a step, on average."""
    computing: float
    """Seconds of a step in which a card computes."""
    step: float
    """Seconds of a step."""
    problem: str = ""
    """Why it does not fit; empty: it does."""
    is_same_model: bool = True

    @property
    def share(self) -> float:
        """Expected share of the time in which cards compute."""
        return self.computing / self.step


def guess_layers(parameters: float, width: int | None) -> int:
    """Layers of a transformer with that many parameters."""
    if width is None:
        return max(1, round(math.cbrt(parameters / (LAYER * ASPECT**2))))
    return max(1, round(parameters / (LAYER * width**2)))


def guess_width(parameters: float, layers: int) -> int:
    """Width of a transformer with that many parameters, a multiple of 64."""
    return max(64, 64 * round(math.sqrt(parameters / (LAYER * layers)) / 64))


def all_reduced(values: float, members: float, bits: float) -> float:
    """Bytes that each member sends in an all-reduce, and receives: (n - 1) / n of the values, there and back.

    Less is not possible (Patarasuk and Yuan 2009). Each member reduces a part that all others send it.

    Args:
        bits: of a value and of an average, together.
    """
    return (members - 1) / members * values * bits / 8


def line(situation: Situation, users: int = 1) -> float:
    """Bytes per second each way for one of the users of a peer's line."""
    return min(situation.uplink, situation.downlink, FASTEST_LINE) / users / LINE_FACTOR


def averaging(
    situation: Situation, how: Averaging, parameters: float, members: int, users: int = 1
) -> tuple[float, float]:
    """Bytes that a member sends for a step, and the seconds that this takes, both on average."""
    if members == 1:
        return 0.0, 0.0
    sent = all_reduced(how.values * parameters, members, how.bits)
    if how.sync_every is None:
        sent += all_reduced(parameters, members, how.bits) / STATE_EVERY
    seconds = sent / line(situation, users) + ROUND_SECONDS + ROUND_TRIPS * situation.round_trip
    steps = how.sync_every or 1
    return sent / steps, seconds / steps


def held(situation: Situation, weights: float, layers: float, waiting: int = 1) -> tuple[float, int]:
    """Bytes on a card with these layers, and the FLOP for each parameter and token.

    Args:
        weights: bytes that do not depend on the batch.
        waiting: microbatches of one sample that are on their way at the same time.
    """
    unit = situation.sequence * situation.width
    kept = weights + waiting * GRAPH * unit * layers
    if kept <= situation.usable:
        return kept, FLOP
    return weights + unit * (waiting * INPUT + layers * INPUT + GRAPH), FLOP_REPEATED


def methods(situation: Situation) -> list[Estimate]:
    """All ways, in the order in which they are preferred: first those that change least."""
    rarely = Averaging(FOUR_BITS, situation.sync_every)
    return [
        _copies(situation, "Optimizer, float16", FLOAT_16, OPTIMIZER),
        _copies(situation, "Optimizer, 8 bits", EIGHT_BITS, OPTIMIZER),
        *_sharded(situation, "sharded, Optimizer", EIGHT_BITS, SHARDED_OPTIMIZER),
        _copies(situation, "Optimizer, PowerSGD", LOW_RANK, POWER_SGD),
        _copies(situation, "DiLoCo, 4 bits", rarely, DILOCO),
        *_sharded(situation, "sharded, DiLoCo", rarely, SHARDED_DILOCO),
        _fastest_stages(situation, "stages, Optimizer", EIGHT_BITS, OPTIMIZER),
        _fastest_stages(situation, "stages, DiLoCo", rarely, DILOCO),
        _experts(situation),
    ]


def _problem(situation: Situation, card: float, ram: float) -> str:
    if card > situation.usable:
        return "card too small"
    return "too little RAM" if ram > situation.ram else ""


def _copies(situation: Situation, name: str, how: Averaging, uses: Sequence[MemoryUse], shards: int = 1) -> Estimate:
    """Each peer has the whole model, on each of its cards or sharded over its cards."""
    for use in uses:
        card, flop = held(situation, use.card * situation.parameters / shards, situation.layers)
        if card <= situation.usable:
            break
    speed = situation.peers * max(situation.cards, shards) * situation.flops
    computing = flop * situation.parameters * situation.batch * situation.sequence / speed
    sent, seconds = averaging(situation, how, situation.parameters, situation.peers)
    ram = use.ram * situation.parameters
    layout = f"{shards} cards" if shards > 1 else use.option
    return Estimate(name, layout, card, ram, sent, computing, computing + seconds, _problem(situation, card, ram))


def _sharded(situation: Situation, name: str, how: Averaging, uses: Sequence[MemoryUse]) -> list[Estimate]:
    """Sharded over the cards of a peer with FSDP2; empty: one card holds the model, or no number of cards does."""
    for shards in (2**power for power in range(11)):  # machines have powers of two
        found = _copies(situation, name, how, uses, shards)
        if found.card <= situation.usable:
            break
    else:
        return []
    if shards > situation.cards:
        found = replace(found, problem=f"needs {shards} cards")
    return [found] if shards > 1 else []


def _fastest_stages(situation: Situation, name: str, how: Averaging, uses: Sequence[MemoryUse]) -> Estimate:
    """Each card holds one of several stages, as many as are fastest; if possible, two cards or more hold each."""
    counts = range(2, max(2, situation.layers) + 1)
    options = [(count, _stages(situation, name, count, how, use)) for use in uses for count in counts]
    fitting = [(count, each) for count, each in options if not each.problem]
    if not fitting:  # then the fewest that would fit if there were more peers
        return next((each for _, each in options if each.card <= situation.usable), options[-1][1])
    spare = [each for count, each in fitting if 2 * count <= situation.peers * situation.cards]
    return min(spare or [each for _, each in fitting], key=lambda each: each.step)


def _stages(situation: Situation, name: str, count: int, how: Averaging, use: MemoryUse) -> Estimate:
    workers = situation.peers * situation.cards
    holders = max(1, workers // count)  # of the stage that has fewest
    part = situation.parameters / count
    card, flop = held(situation, use.card * part, situation.layers / count, waiting=count)
    samples = situation.batch / holders
    computing = flop * part * samples * situation.sequence / situation.flops
    # Each boundary tensor goes forward, and its gradient back. A peer of a stage in the middle sends both.
    tensor = situation.sequence * (situation.boundary or situation.width) * situation.activation_bits / 8
    crossing = samples * tensor * (2 if count > 2 else 1)
    # Microbatches overlap, so the slower of computing and sending counts. At both ends of a step the pipeline is not
    # full: that costs count - 1 microbatches (Huang et al. 2019, arXiv 1811.06965), and as many round trips.
    steady = max(computing, crossing / line(situation, situation.cards))
    filling = (count - 1) * (steady / samples + situation.round_trip)
    sent, seconds = averaging(situation, how, part, holders, situation.cards)
    sent = (sent + crossing) * situation.cards
    ram = use.ram * part * situation.cards
    problem = _problem(situation, card, ram) or (f"needs {count} peers" if workers < count else "")
    return Estimate(name, f"{count} × {holders}", card, ram, sent, computing, steady + filling + seconds, problem)


def _experts(situation: Situation) -> Estimate:
    """The feed-forward networks are experts, one of each layer at each peer; all peers have everything else."""
    trunk = (1 - FEED_FORWARD) * situation.parameters
    others = FEED_FORWARD * situation.parameters
    for use in OPTIMIZER:
        weights = use.card * trunk + EXPERT * others / situation.peers
        card, flop = held(situation, weights, situation.layers)
        if card <= situation.usable:
            break
    tokens = situation.batch / situation.peers * situation.sequence
    active = trunk + others * min(1.0, EXPERTS_PER_TOKEN / situation.peers)
    computing = flop * active * tokens / (situation.flops * situation.cards)
    elsewhere = (situation.peers - 1) / situation.peers * EXPERTS_PER_TOKEN * situation.layers
    calls = elsewhere * TENSORS_OF_A_CALL * tokens * situation.width * situation.activation_bits / 8
    waiting = 2 * situation.layers * situation.round_trip
    sent, seconds = averaging(situation, FLOAT_16, trunk, situation.peers)
    step = computing + seconds + calls / line(situation) + waiting
    ram = use.ram * trunk
    problem = _problem(situation, card, ram)
    return Estimate("experts", use.option, card, ram, sent + calls, computing, step, problem, is_same_model=False)


def recommend(found: Sequence[Estimate]) -> Estimate | None:
    """The first way that fits and is nearly as fast as the fastest one; ``None``: none fits."""
    fitting = [each for each in found if not each.problem and each.is_same_model]
    fastest = min((each.step for each in fitting), default=0.0)
    return next((each for each in fitting if NEARLY * each.step <= fastest), None)


def improve(situation: Situation, best: Estimate) -> tuple[str, Estimate] | None:
    """The option that raises the share most, and what is best with it; ``None``: none raises it by a fifth."""
    narrow, batch, sync_every = max(1, situation.width // 16), 4 * situation.batch, 5 * situation.sync_every
    changes = {
        f"--batch {batch}": replace(situation, batch=batch),
        f"--sync-every {sync_every}": replace(situation, sync_every=sync_every),
    }
    if best.name.startswith("stages"):
        changes[f"--boundary {narrow}"] = replace(situation, boundary=narrow)
    after = {option: recommend(methods(changed)) or best for option, changed in changes.items()}
    option = max(after, key=lambda each: after[each].share)
    return (option, after[option]) if after[option].share > 1.2 * best.share else None
