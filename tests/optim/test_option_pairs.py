"""Every two options together: what contradicts itself is refused, and whatever is accepted keeps two peers together.

Rows of options are chosen so that each pair of values that can go together is in at least one of them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.averaging import ClipToMedianNorm, TrimmedMean
from shoal.compression import Float16Compression
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.options import DEFAULT_GRAD_AVERAGER, Mode, Options, with_defaults
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import in_parallel, meet, sgd, values

Row = dict[str, Any]

VALUES: dict[str, list[Any]] = {
    "use_local_updates": [False, True],
    "offload_optimizer": [False, True],
    "delay_optimizer_step": [None, False, True],
    "delay_grad_averaging": [False, True],
    "delay_state_averaging": [True, False],
    "reuse_grad_buffers": [False, True],
    "grad_averager": [DEFAULT_GRAD_AVERAGER, GradientAverager, "PowerSGD", "PowerEF"],
    "use_ext_grad_buffer": [None, False, True],
    "client_mode": [False, True],
    "average_state_every": [1, 2],
    "batch_size_per_step": [None, 8],
    "scheduler": [False, True],
    "average_opt_statistics": [(), ("momentum_buffer",)],
    "grad_compression": [None, Float16Compression()],
    "state_averaging_compression": [None, Float16Compression()],
    "group_of_two": [False, True],
    "aggregation": [None, ClipToMedianNorm()],
    "state_aggregation": [None, TrimmedMean(0.3)],
    "peer_momentum": [0.0, 0.9],
}
"""Of each option; ``client_mode`` is that of the second peer."""

CONTRADICTIONS: list[Row] = [
    {"use_local_updates": True, "reuse_grad_buffers": True},
    {"use_local_updates": True, "delay_grad_averaging": True},
    {"use_local_updates": True, "use_ext_grad_buffer": True},
    *({"use_local_updates": True, "grad_averager": averager} for averager in VALUES["grad_averager"][1:]),
    {"delay_grad_averaging": True, "delay_optimizer_step": False},
    {"delay_grad_averaging": True, "offload_optimizer": False},
    {"delay_optimizer_step": True, "offload_optimizer": False},
    {"use_local_updates": True, "aggregation": VALUES["aggregation"][1]},
    {"use_local_updates": True, "peer_momentum": 0.9},
    # The optimizer has no momentum that could be averaged.
    {"peer_momentum": 0.9, "average_opt_statistics": ("momentum_buffer",)},
]
LOW_RANK = {
    "PowerSGD": PowerSGDGradientAverager.get_factory(averager_rank=2, min_compression_ratio=0.0),
    "PowerEF": PowerEFGradientAverager.get_factory(averager_rank=2, min_compression_ratio=0.0),
}
EPOCHS = 4
OF_AVERAGERS = {"group_of_two"}


def without_momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def contradicts_itself(row: Row) -> bool:
    return any(all(row.get(name, ...) == value for name, value in pair.items()) for pair in CONTRADICTIONS)


def resolve(row: Row) -> Options:
    given = {"optimizer": sgd, "params": [torch.nn.Parameter(torch.zeros(1))], "run_id": "run", "target_batch_size": 8}
    return Options.resolve(**with_defaults(Optimizer, {**given, **row}))


# What the constructor checks before it makes anything.
CHECKED = [
    "use_local_updates",
    "offload_optimizer",
    "delay_optimizer_step",
    "delay_grad_averaging",
    "delay_state_averaging",
    "reuse_grad_buffers",
    "grad_averager",
    "use_ext_grad_buffer",
    "average_state_every",
    "batch_size_per_step",
    "aggregation",
    "peer_momentum",
]


def test_only_contradictions_are_refused() -> None:
    modes = set()
    for combination in itertools.product(*(VALUES[name] for name in CHECKED)):
        row = dict(zip(CHECKED, combination, strict=True))
        if contradicts_itself(row):
            with pytest.raises((ValueError, AssertionError), match="|".join(CHECKED)):
                resolve(row)
        else:
            modes.add(resolve(row).mode)
    assert modes == set(Mode)


Pair = frozenset[tuple[str, int]]
"""Two options, each with the place of its value."""


def places(row: Row) -> list[tuple[str, int]]:
    return [(name, VALUES[name].index(value)) for name, value in row.items()]


def pairs_of(row: Row) -> Iterator[Pair]:
    yield from map(frozenset, itertools.combinations(places(row), 2))


def make_rows() -> list[Row]:
    """Greedily: begin each row with a pair that no row has yet, then take for each option the value with most news."""
    every = [pair for names in itertools.combinations(VALUES, 2) for pair in _pairs(*names)]
    missing = {pair: None for pair in every if _complete(_read(pair), {}) is not None}
    rows: list[Row] = []
    while missing:
        row = _complete(_read(next(iter(missing))), missing)
        assert row is not None
        rows.append(row)
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


def _pairs(first: str, second: str) -> Iterator[Pair]:
    for i, j in itertools.product(range(len(VALUES[first])), range(len(VALUES[second]))):
        yield frozenset({(first, i), (second, j)})


def _read(pair: Pair) -> Row:
    return {name: VALUES[name][index] for name, index in pair}


def _complete(row: Row, missing: dict[Pair, None]) -> Row | None:
    """The row with a value for each option, in the order of ``VALUES``; ``None`` if every one contradicts itself."""
    if contradicts_itself(row):
        return None
    name = next((name for name in VALUES if name not in row), None)
    if name is None:
        return {name: row[name] for name in VALUES}

    others = places(row)

    def news(value: Any) -> int:
        own = (name, VALUES[name].index(value))
        return sum(frozenset({own, other}) in missing for other in others)

    for value in sorted(VALUES[name], key=news, reverse=True):
        completed = _complete({**row, name: value}, missing)
        if completed is not None:
            return completed
    return None


ROWS = make_rows()


def test_the_rows_have_all_pairs() -> None:
    covered = {pair for row in ROWS for pair in pairs_of(row)}
    every = {pair for names in itertools.combinations(VALUES, 2) for pair in _pairs(*names)}
    impossible = {pair for pair in every if _complete(_read(pair), {}) is None}
    assert covered == every - impossible
    assert len(impossible) == len(CONTRADICTIONS)
    assert {"delay_optimizer_step": True, "delay_state_averaging": False}.items() <= set().union(
        *(_hashable(row) for row in ROWS)
    )


def _hashable(row: Row) -> set[tuple[str, Any]]:
    return {(name, value) for name, value in row.items() if not isinstance(value, Float16Compression)}


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_two_peers_stay_together(make_trainers, caplog, row):
    options = {name: value for name, value in row.items() if name not in OF_AVERAGERS | {"client_mode"}}
    options["grad_averager"] = LOW_RANK.get(options["grad_averager"], options["grad_averager"])
    if row["scheduler"]:
        options["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    else:
        del options["scheduler"]
    if row["group_of_two"]:
        options["averager_opts"] = {"target_group_size": 2}
    if row["peer_momentum"]:
        options["optimizer"] = without_momentum
    caplog.set_level(logging.WARNING, logger="shoal")
    first, second = make_trainers(
        2,
        clients=int(row["client_mode"]),
        seeds=[0, 1],  # averaging parameters must bring them together
        offload=row["offload_optimizer"],
        **options,
    )
    apart = (values(first.model) - values(second.model)).norm()
    meet(first, second)
    in_parallel(*(lambda t=trainer: t.train_until(EPOCHS) for trainer in (first, second)))
    for trainer in (first, second):
        trainer.opt.state_averager.finish_jobs(10)
    last_round = None if first.opt.grad_averager is None else first.opt.grad_averager.last_round
    in_parallel(first.opt.shutdown, second.opt.shutdown)  # they may be in a group already
    assert [record.getMessage() for record in caplog.records] == []
    assert (values(first.model) - values(second.model)).norm() < 0.02 * apart
    if row["grad_averager"] is not DEFAULT_GRAD_AVERAGER:
        assert len(last_round.peers) == 2
