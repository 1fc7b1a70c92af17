"""Small states as donors give them."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.averaging.state.download import State

RUN = "run"


def small_state(epoch: int, names: tuple[str, ...] = ("layer.weight", "layer.bias")) -> State:
    """The state of an ``Optimizer`` with two parameters, whose values tell the epoch."""
    parameters = [torch.full((3, 2), float(epoch)), torch.full((3,), epoch + 0.5)]
    statistics = [torch.full_like(parameter, -float(epoch)) for parameter in parameters]
    metadata = {
        "epoch": epoch,
        "tensors": {"parameters": 2, "extra": 0, "buffers": 0},
        "names": {"parameters": list(names), "extra": []},
        "optimizer_metadata": {"names": ["/0/momentum_buffer", "/1/momentum_buffer"]},
    }
    return State(metadata, [*parameters, *statistics])


def is_state_of(state: State, epoch: int) -> bool:
    """Whether it is the state of that epoch, to the last value."""
    expected = small_state(epoch)
    return state.metadata == expected.metadata and all(map(torch.equal, state.tensors, expected.tensors))


def files_of(folder: Path) -> list[str]:
    """What stands in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
