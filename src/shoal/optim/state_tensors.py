"""The tensors of a training state: the user's, the optimizer's, and those that are averaged with other peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.averaging.finite import all_finite, without_overflow
from shoal.compression import CompressionInfo, TensorRole
from shoal.optim.devices import copy_all, copy_to_host
from shoal.optim.training_setup import TrainingSetup


class StateTensors:
    """Knows which tensors are copies of which, and moves values between them.

    Args:
        setup: parameters and optimizer.
        average_opt_statistics: names of optimizer statistics that are averaged, too.
        extra_tensors: further tensors that are averaged and given to newcomers.
        reuse_tensors: average the optimizer's own tensors instead of copies, and extra tensors that are on the CPU.

    Raises:
        ValueError: tensors that are averaged in place are not on the CPU, or there is no such statistic.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        average_opt_statistics: Sequence[str],
        extra_tensors: Sequence[torch.Tensor],
        reuse_tensors: bool,
    ) -> None:
        self.setup, self.reuse_tensors = setup, reuse_tensors
        self.extra_tensors = tuple(extra_tensors)
        self.average_opt_statistics = tuple(average_opt_statistics)
        self._check_statistics()
        local = self.local()
        not_here = [index for index, tensor in enumerate(local) if tensor.device.type != "cpu"]
        if reuse_tensors and any(index < len(local) - len(self.extra_tensors) for index in not_here):
            raise ValueError("reuse_tensors=True averages tensors in place: they must be on the CPU")
        self._copied = not_here if reuse_tensors else list(range(len(local)))
        """Which of the averaged tensors are copies."""
        self.averaged = [tensor.detach() for tensor in local]
        for index in self._copied:
            self.averaged[index] = copy_for_averaging(local[index])
        self._before_averaging: list[torch.Tensor] | None = None

    def _check_statistics(self) -> None:
        state = self.setup.optimizer.state
        for name in self.average_opt_statistics:
            if not any(isinstance(statistics.get(name), torch.Tensor) for statistics in state.values()):
                raise ValueError(
                    f"average_opt_statistics: {type(self.setup.optimizer).__name__} keeps no statistic {name!r}"
                )

    def statistics(self, name: str) -> list[torch.Tensor]:
        """One statistic of all parameters that have it."""
        state = self.setup.optimizer.state
        return [state[p][name] for p in self.setup.optimizer_parameters if p in state and name in state[p]]

    def local(self) -> list[torch.Tensor]:
        """The tensors whose values are averaged, where the optimizer has them, in the order of ``averaged``."""
        statistics = [tensor for name in self.average_opt_statistics for tensor in self.statistics(name)]
        return [*self.setup.optimizer_parameters, *statistics, *self.extra_tensors]

    def infos(self) -> list[CompressionInfo]:
        """What codecs may know about ``averaged``."""
        setup = self.setup
        keyed: list[tuple[Any, TensorRole]] = [(name, TensorRole.PARAMETER) for name in setup.parameter_names]
        names = dict(zip(map(id, setup.optimizer_parameters), setup.parameter_names, strict=True))
        for statistic in self.average_opt_statistics:
            keyed += [
                ((names[id(p)], statistic), TensorRole.OPTIMIZER)
                for p in setup.optimizer_parameters
                if p in setup.optimizer.state and statistic in setup.optimizer.state[p]
            ]
        keyed += [(index, TensorRole.UNSPECIFIED) for index in range(len(self.extra_tensors))]
        return [
            CompressionInfo.from_tensor(tensor, key=key, role=role)
            for tensor, (key, role) in zip(self.averaged, keyed, strict=True)
        ]

    @torch.no_grad()
    def adopt_statistics(self) -> None:
        """The optimizer has got new statistics: put them where they are averaged, if that is in place."""
        if not self.reuse_tensors or not self.average_opt_statistics:
            return
        index = len(self.setup.optimizer_parameters)
        state = self.setup.optimizer.state
        for name in self.average_opt_statistics:
            for p in self.setup.optimizer_parameters:
                if p in state and name in state[p]:
                    self.averaged[index].copy_(state[p][name])
                    state[p][name] = self.averaged[index]
                    index += 1

    # --- moving values; the caller holds the locks --------------------------------------------------------------------

    @torch.no_grad()
    def load_into_averaged(self, remember: bool = False) -> None:
        """Before averaging: bring the copies up to date.

        Args:
            remember: keep what was loaded, for :meth:`take_averaged` with ``as_difference``.
        """
        self._copy(from_local=True)
        self._before_averaging = [tensor.clone() for tensor in self.averaged] if remember else None

    @torch.no_grad()
    def take_averaged(self, as_difference: bool = False) -> None:
        """After averaging: put the results where the optimizer has its tensors.

        Args:
            as_difference: add what averaging has changed, so that local steps made meanwhile survive.
        """
        if not as_difference or self._before_averaging is None:
            self._copy(from_local=False)
            return
        for local, new, old in zip(self.local(), self.averaged, self._before_averaging, strict=True):
            add_change(local, new, old)
        self._before_averaging = None

    def _copy(self, from_local: bool) -> None:
        local = self.local()
        ours, theirs = [self.averaged[i] for i in self._copied], [local[i] for i in self._copied]
        copy_all(*((ours, theirs) if from_local else (theirs, ours)))

    @torch.no_grad()
    def update_main_parameters(self) -> None:
        """Put the optimizer's parameters into the user's model, where they are not the same tensors."""
        if self.setup.is_offloaded:
            copy_all(self.setup.main_parameters, self.setup.optimizer_parameters)

    @torch.no_grad()
    def take_main_gradients(self) -> None:
        """Give the optimizer the gradients of the user's model, where they are not the same tensors."""
        if not self.setup.is_offloaded:
            return
        for main, stepped in zip(self.setup.main_parameters, self.setup.optimizer_parameters, strict=True):
            if main.grad is None:
                stepped.grad = None
            elif stepped.grad is None:
                stepped.grad = copy_to_host(main.grad, stepped.dtype)
            else:
                copy_all([stepped.grad], [main.grad])


def add_change(local: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> None:
    """Add what averaging has changed; values that were not finite before it are replaced."""
    change = new - old
    if not all_finite(change):
        spoilt = ~old.isfinite()
        local[spoilt.to(local.device)] = new[spoilt].to(local.device, local.dtype)
        change = torch.where(spoilt, 0, without_overflow(change))
    local.add_(change.to(local.device))


def copy_for_averaging(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; half precision is averaged in single precision."""
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return copy_to_host(tensor, dtype)
