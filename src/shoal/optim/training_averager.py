"""Average a model with other peers whenever the training loop calls for it.

A round copies the user's tensors, averages the copies, and writes the result back: as a whole, or, if training
continues meanwhile, as the difference that averaging has made.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from shoal.averaging import DecentralizedAverager, StepControl
from shoal.averaging.control import Gathered
from shoal.averaging.state.download import Layout, OwnedState, layout_of
from shoal.base.logs import words_of
from shoal.base.reactor import in_thread
from shoal.compression import CompressionInfo, TensorRole
from shoal.errors import AveragingError
from shoal.optim.setup.devices import copy_all, wait_for_devices
from shoal.optim.setup.optimizer_state import TorchOptimizer, has_statistics, initialize_optimizer_state_, statistics_of
from shoal.optim.setup.training_setup import TrainingSetup, prepare_training
from shoal.optim.setup.training_state import TrainingState, add_change, apply_state, copy_for_averaging, describe_state
from shoal.p2p import PeerID

__all__ = ["TrainingAverager"]

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TrainingAverager(DecentralizedAverager):
    """Averages parameters, gradients or optimizer statistics of a model with other peers, one round per call.

    It is for training loops of the user's own. :class:`~shoal.Optimizer` decides itself when to average and to step.

    Args:
        opt: optimizer of the model.
        average_parameters: average the parameters.
        average_gradients: average ``parameter.grad``.
        average_opt_statistics: names of optimizer statistics to average, such as ``"exp_avg_sq"``.
        extra_tensors: further tensors to average.
        parameter_names: names for codecs; default: their numbers.
        initialize_optimizer: create the optimizer's statistics at once.
        averager_kwargs: see :class:`~shoal.averaging.DecentralizedAverager`.

    Raises:
        ValueError: there is nothing to average, or a statistic does not exist.
    """

    def __init__(
        self,
        opt: TorchOptimizer,
        *,
        average_parameters: bool,
        average_gradients: bool,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        parameter_names: Iterable[str] | None = None,
        initialize_optimizer: bool = True,
        **averager_kwargs: Any,
    ) -> None:
        self.opt, self.extra_tensors = opt, tuple(extra_tensors)
        self.average_parameters, self.average_gradients = average_parameters, average_gradients
        self.opt_statistics = tuple(average_opt_statistics)
        self._setup: TrainingSetup = prepare_training(opt, None, None, parameter_names, offload_optimizer=False)
        self.parameter_names = self._setup.parameter_names
        if initialize_optimizer and not has_statistics(opt):
            initialize_optimizer_state_(opt)
        self.local_step = 0
        self._step_lock = threading.Lock()
        with torch.no_grad():
            averaged = [copy_for_averaging(tensor) for tensor in self.local_tensors()]
        if not averaged:
            raise ValueError("there is nothing to average: choose parameters, gradients, statistics or extra_tensors")
        averager_kwargs.setdefault("tensor_infos", self._describe(averaged))
        super().__init__(averaged, **averager_kwargs)

    # --- what is averaged ---------------------------------------------------------------------------------------------

    def _local(self) -> Iterator[tuple[torch.Tensor, Any, TensorRole]]:
        named = list(zip(self._setup.main_parameters, self.parameter_names, strict=True))
        if self.average_parameters:
            yield from ((parameter, name, TensorRole.PARAMETER) for parameter, name in named)
        if self.average_gradients:
            for parameter, name in named:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                yield parameter.grad, name, TensorRole.GRADIENT
        for statistic in self.opt_statistics:
            for parameter, name in named:
                if not isinstance(self.opt.state.get(parameter, {}).get(statistic), torch.Tensor):
                    raise ValueError(f"{type(self.opt).__name__} keeps no statistic {statistic!r} of parameter {name}")
                yield self.opt.state[parameter][statistic], (name, statistic), TensorRole.OPTIMIZER
        yield from ((tensor, index, TensorRole.UNSPECIFIED) for index, tensor in enumerate(self.extra_tensors))

    def local_tensors(self) -> Iterator[torch.Tensor]:
        """The user's tensors, in the order in which they are averaged. Missing gradients are created as zeros."""
        return (tensor for tensor, _, _ in self._local())

    def _describe(self, averaged: Sequence[torch.Tensor]) -> list[CompressionInfo]:
        return [
            CompressionInfo.from_tensor(tensor, key=key, role=role)
            for tensor, (_, key, role) in zip(averaged, self._local(), strict=True)
        ]

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self, data_lock: contextlib.AbstractContextManager[Any] | None = None, wait: bool = True, **kwargs: Any
    ) -> Gathered | concurrent.futures.Future[Gathered | None] | None:
        """Average once. A round that fails leaves the model as it is.

        Args:
            data_lock: a lock to hold while the model is read or changed. With it, the change that averaging has made is
                added to the model, so that training can continue during the round. Without it, the averages replace the
                model's values.
            wait: return the result; otherwise return a future of it at once.
            kwargs: options of the round, see :meth:`DecentralizedAverager.step`.

        Returns:
            What each member gave as ``gather``, by member; ``None`` if the round failed.
        """
        if wait:
            return self._average(data_lock, kwargs)
        return in_thread(functools.partial(self._average, data_lock, kwargs))

    @torch.no_grad()
    def _average(
        self, data_lock: contextlib.AbstractContextManager[Any] | None, options: dict[str, Any]
    ) -> Gathered | None:
        access = contextlib.nullcontext() if data_lock is None else data_lock
        with self._step_lock:
            with access, self.get_tensors() as averaged:
                local = list(self.local_tensors())
                # Training may have launched work on other streams than this thread's.
                wait_for_devices(local)
                copy_all(averaged, local)
                before = None if data_lock is None else [tensor.clone() for tensor in averaged]
            gathered = self._run_round(options)
            if gathered is not None:
                with access, self.get_tensors() as averaged:
                    local = list(self.local_tensors())
                    if before is None:
                        copy_all(local, averaged)
                    else:
                        for tensor, new, old in zip(local, averaged, before, strict=True):
                            add_change(tensor, new, old)
                    # Training may continue only when all values are written.
                    wait_for_devices(local)
            self.local_step += 1
            return gathered

    def _run_round(self, options: dict[str, Any]) -> Gathered | None:
        control = super().step(**{**options, "wait": False})
        assert isinstance(control, StepControl)
        try:
            return control.result()
        except AveragingError as e:
            logger.warning("the model was not averaged in step %d: %s", self.local_step, words_of(e))
            return None
        except BaseException:
            control.cancel()
            raise

    # --- state --------------------------------------------------------------------------------------------------------

    def get_current_state(self) -> OwnedState:
        """The state that newcomers download: parameters, extra tensors, optimizer state and the number of steps."""
        with self._step_lock:
            wait_for_devices(self._setup.main_parameters)
            state = describe_state(self._setup, self.extra_tensors, [], self.local_step, self.node.group_bits)
        metadata = {**state.metadata, "step": self.local_step}
        return OwnedState(metadata, state.tensors, state.infos)

    def _expected_layout(self) -> Layout | None:
        if not self._gives_the_state_of(TrainingAverager):
            return None
        return layout_of([*self._setup.optimizer_parameters, *self.extra_tensors, *statistics_of(self.opt)])

    def load_state_from_peers(
        self, wait: bool = True, timeout: float | None = None, *, skip: Collection[PeerID] = ()
    ) -> Any:
        """Download the state of another peer and put it into the model and its optimizer.

        Args:
            wait: return whether a state was taken over; otherwise return a future of that at once.
            timeout: the longest time for the download, in seconds.
            skip: donors that are not asked.
        """
        if not wait:
            return in_thread(functools.partial(self.load_state_from_peers, timeout=timeout, skip=skip))
        downloaded = super().load_state_from_peers(timeout=timeout, skip=skip)
        if downloaded is None:
            return False
        try:
            state = TrainingState.parse(
                downloaded.metadata, downloaded.tensors, self._setup, self.extra_tensors, buffers=[]
            )
        except ValueError as e:
            logger.warning("a downloaded training state was refused: %s", words_of(e))
            return False
        with self._step_lock:
            apply_state(state, self._setup, self.extra_tensors)
            wait_for_devices(self._setup.main_parameters)
            self.local_step = max(self.local_step, state.epoch)
        return True
