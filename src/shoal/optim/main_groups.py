"""Parameter groups of an optimizer that steps copies, with the user's own parameters in place of the copies."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch


class MainGroup(MutableMapping[str, Any]):
    """One group. Hyper-parameters are read from the optimizer and written to it; the parameters are the user's.

    Args:
        optimizer: has the copies.
        index: of the group.
        parameters: the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: int, parameters: list[torch.Tensor]) -> None:
        self._optimizer, self._index, self._parameters = optimizer, index, parameters

    @property
    def _group(self) -> dict[str, Any]:
        return self._optimizer.param_groups[self._index]  # loading a checkpoint replaces it

    def __getitem__(self, name: str) -> Any:
        return self._parameters if name == "params" else self._group[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params":
            raise ValueError("the parameters of a run in progress cannot be exchanged: all peers must have the same")
        self._group[name] = value

    def __delitem__(self, name: str) -> None:
        if name == "params":
            raise ValueError("the parameters of a run in progress cannot be removed: all peers must have the same")
        del self._group[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))


def main_groups(optimizer: torch.optim.Optimizer, main_parameters: Sequence[torch.Tensor]) -> tuple[MainGroup, ...]:
    """All groups, in order.

    Args:
        main_parameters: one for each parameter of the optimizer, in the same order.
    """
    left = iter(main_parameters)
    return tuple(
        MainGroup(optimizer, index, [next(left) for _ in group["params"]])
        for index, group in enumerate(optimizer.param_groups)
    )
