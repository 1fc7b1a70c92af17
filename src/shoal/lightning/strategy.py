"""A Lightning strategy that trains a ``LightningModule`` with peers: it wraps the optimizer in that of the swarm."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import torch

import shoal
from shoal.lightning.distributed import current_rank
from shoal.lightning.flavours import flavour_of, in_flavour
from shoal.lightning.local_processes import LocalProcesses
from shoal.lightning.options import (
    INITIAL_PEERS_ENV,
    check_delays,
    check_names,
    initial_peer_addresses,
    joining_instructions,
    outer_options,
)
from shoal.lightning.training_loop import (
    GradientClipping,
    SwarmProgress,
    joint_schedule,
    move_optimizer,
    progress_of,
)
from shoal.optim.ranks.several_processes import SeveralProcesses
from shoal.optim.setup.schedules import HiveMindScheduler, forget_schedule, take_back

__all__ = ["HiveMindScheduler", "HivemindStrategy"]

AnyOptimizer = Union["shoal.Optimizer", "shoal.MultiProcessOptimizer", "shoal.DiLoCo", "shoal.MultiProcessDiLoCo"]

DEFAULT_AVERAGER_OPTS = {"request_timeout": 1.0}
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


class _OfTheUsersLightning(ABCMeta):
    """Makes strategies that the ``Trainer`` of the user's Lightning accepts.

    ``__new__`` could do so, too, but it would hide the parameters from editors and ``LightningCLI``.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        of_the_users_lightning: Any = in_flavour(cls, flavour_of(cls).package)
        return type.__call__(of_the_users_lightning, *args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        of_self = inspect.signature(cls.__init__)  # type: ignore[misc]  # subclasses may have others
        return of_self.replace(parameters=list(of_self.parameters.values())[1:], return_annotation=cls)


class HivemindStrategy(LocalProcesses, metaclass=_OfTheUsersLightning):
    """Trains with all peers of a run, which make each step together.

    Every peer is a whole ``Trainer`` of its own, with its own data order, loggers and checkpoints. Peers may join and
    leave at any time. See :class:`shoal.Optimizer` for how a step is made. With ``Trainer(devices=2)`` this peer is two
    processes, started by Lightning or by ``torchrun``; the first one talks to the swarm, see
    :class:`shoal.MultiProcessOptimizer`.

    With ``low_communication`` each peer makes steps of its own, and peers exchange parameters now and then, see
    :class:`shoal.DiLoCo`, and for several processes :class:`shoal.MultiProcessDiLoCo`. The model holds the outer
    parameters while it is validated, and after ``fit``.

    The peer leaves the run when ``fit`` ends. Another ``fit`` joins again, at another address.

    Args:
        target_batch_size: samples of all peers together that make a step; with ``low_communication``, samples between
            two exchanges. ``None`` if ``low_communication`` has ``sync_every`` instead.
        run_id: name of the run; peers with the same name train together.
        batch_size: samples per step of this process' optimizer; default: counted in the batches.
        delay_state_averaging: average parameters in the background.
        delay_optimizer_step: step in the background, one step later; implies ``offload_optimizer``.
        delay_grad_averaging: average gradients in the background, too; needs ``delay_optimizer_step``, which it turns
            on if ``offload_optimizer`` is.
        offload_optimizer: keep single precision parameters and optimizer statistics on the CPU.
        reuse_grad_buffers: accumulate in ``parameter.grad`` itself; ``optimizer_zero_grad`` is disabled meanwhile.
        scheduler_fn: takes an optimizer and makes its learning rate scheduler, which replaces those that
            ``configure_optimizers`` returns. The scheduler advances once per step of the swarm.
        matchmaking_time: seconds that a group waits for members that do not come.
        averaging_timeout: seconds after which a round of averaging is given up.
        verbose: log what happens at level INFO.
        averager_opts: further options of averagers; default: ``{"request_timeout": 1.0}``.
        host_maddrs: where to listen; default: ``SHOAL_HOST_MADDRS``, or all networks of this machine.
        initial_peers: addresses of peers of the run, as a list or separated by commas; the environment variable
            ``PL_INITIAL_PEERS`` overrides it. Without any, the peer begins a run and prints how others can join.
        use_ipfs, wait_timeout, bootstrap_timeout, use_relay, use_auto_relay, identity_path, token: as for
            :class:`shoal.DHT`.
        low_communication: options of :class:`shoal.DiLoCo` by name, such as ``{"sync_every": 50}``. Options that are
            arguments of this class are given there, with the defaults of this class.
        optimizer_kwargs: further options of :class:`shoal.Optimizer`.

    Raises:
        ValueError: options that contradict each other.
        TypeError: options that do not exist.
        BootstrapError: no initial peer could be reached; the text says why for each address.
        ModuleNotFoundError: Lightning is not installed.
    """

    INITIAL_PEERS_ENV = INITIAL_PEERS_ENV
    strategy_name = "hivemind"

    def __init__(
        self,
        target_batch_size: int | None,
        run_id: str = "lightning_run",
        batch_size: int | None = None,
        delay_state_averaging: bool = False,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        offload_optimizer: bool | None = None,
        reuse_grad_buffers: bool = False,
        scheduler_fn: Callable[[torch.optim.Optimizer], Any] | None = None,
        matchmaking_time: float = 5.0,
        averaging_timeout: float = 30.0,
        verbose: bool = False,
        averager_opts: dict[str, Any] | None = None,
        host_maddrs: Sequence[str] | None = None,
        initial_peers: str | Sequence[str] | None = None,
        use_ipfs: bool = False,
        wait_timeout: float = 3,
        bootstrap_timeout: float | None = None,
        use_relay: bool = True,
        use_auto_relay: bool = True,
        identity_path: str | None = None,
        *,
        token: str | os.PathLike[str] | None = None,
        low_communication: dict[str, Any] | None = None,
        **optimizer_kwargs: Any,
    ) -> None:
        super().__init__()
        for name, samples in {"batch_size": batch_size, "target_batch_size": target_batch_size}.items():
            if samples is not None and samples <= 0:
                raise ValueError(f"{name} must be positive, got {samples}")
        joint: dict[str, Any] = {
            "delay_state_averaging": delay_state_averaging,
            "delay_optimizer_step": delay_optimizer_step,
            "delay_grad_averaging": delay_grad_averaging,
            "offload_optimizer": offload_optimizer,
            "reuse_grad_buffers": reuse_grad_buffers,
        }
        shared: dict[str, Any] = {
            "run_id": run_id,
            "target_batch_size": target_batch_size,
            "matchmaking_time": matchmaking_time,
            "averaging_timeout": averaging_timeout,
            "averager_opts": dict(DEFAULT_AVERAGER_OPTS) if averager_opts is None else averager_opts,
            "verbose": verbose,
        }
        self._steps_alone = low_communication is not None
        if low_communication is not None:
            self._optimizer_options = outer_options(low_communication, shared, optimizer_kwargs, joint)
        else:
            check_names(optimizer_kwargs)
            check_delays(delay_grad_averaging, delay_state_averaging, delay_optimizer_step, offload_optimizer)
            if target_batch_size is None:
                raise ValueError("target_batch_size=None needs low_communication={'sync_every': …}: give a number")
            if delay_grad_averaging and delay_optimizer_step is None:
                joint["delay_optimizer_step"] = True
            if offload_optimizer is None:
                joint["offload_optimizer"] = bool(joint["delay_optimizer_step"])
            self._optimizer_options = {**shared, **joint, **optimizer_kwargs}
        # The swarm's optimizer gets parameters and a function instead of an optimizer.
        self._makes_optimizer = bool(delay_state_averaging or joint["offload_optimizer"])
        self._scheduler_fn = scheduler_fn
        self._reuse_grad_buffers = reuse_grad_buffers
        self._batch_size = batch_size
        self._initial_peers = initial_peer_addresses(initial_peers)
        self._dht_options: dict[str, Any] = {
            "host_maddrs": host_maddrs,
            "use_ipfs": use_ipfs,
            "wait_timeout": wait_timeout,
            "bootstrap_timeout": bootstrap_timeout,
            "use_relay": use_relay,
            "use_auto_relay": use_auto_relay,
            "identity_path": identity_path,
            "token": token,
        }
        self._optimizer: AnyOptimizer | None = None
        self._clipping: GradientClipping | None = None
        self._is_training = self._zero_grad_is_off = False
        self._checkpoint: Mapping[str, Any] | None = None
        self._batch_samples = self._samples_since_step = 0
        self._samples_of_step = batch_size or 0
        # Whether a batch since the last step had a loss.
        self._has_gradients = False
        self.dht: shoal.DHT | None = self._start_dht() if current_rank() == 0 else None
        """Only in the first process of this peer."""

    # --- the swarm ----------------------------------------------------------------------------------------------------

    def _start_dht(self) -> shoal.DHT:
        dht = shoal.DHT(initial_peers=self._initial_peers, start=True, **self._dht_options)
        if not self._initial_peers and dht.get_visible_maddrs():
            self._flavour.find("utilities", "rank_zero_info")(joining_instructions(dht.address))
        return dht

    @property
    def num_peers(self) -> int:
        """Known peers of the run; 1 before training begins."""
        return int(self.swarm_progress().get("peers", 1))

    def swarm_progress(self) -> dict[str, float]:
        """The figures that are shown while training: peers, steps of the swarm, and this peer's samples per second."""
        return {} if self._optimizer is None else progress_of(self._optimizer, self._samples_of_step)

    # --- before training ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Prepare the model, and refuse early any configuration that cannot work.

        Raises:
            MisconfigurationException: not one optimizer, nothing to train, or a precision or processes that do not fit.
            ValueError: a scheduler that cannot follow the swarm.
        """
        self.model_to_device()
        super().setup(trainer)
        self._optimizer = self._checkpoint = None
        self._is_training = trainer.state.fn == "fit"
        if not self._is_training:
            return
        self._check_precision()
        self._check_optimizers()
        self._install_scaler()
        # An earlier fit may have ended the DHT.
        if self.is_global_zero and (self.dht is None or not self.dht.is_alive()):
            self.dht = self._start_dht()
        if self.world_size > 1:
            self._agree_on_order_of_data(None if self.dht is None else self.dht.peer_id.to_bytes())
        if not any(isinstance(callback, SwarmProgress) for callback in trainer.callbacks):
            callback_class = type(
                SwarmProgress.__name__, (SwarmProgress, self._flavour.find("callbacks", "Callback")), {}
            )
            # First in the list, so that other callbacks see what it logs.
            trainer.callbacks.insert(0, callback_class())

    def _check_precision(self) -> None:
        precision = str(self.precision_plugin.precision)
        if precision not in PRECISIONS:
            raise self._flavour.misconfigured(
                f"HivemindStrategy does not support precision={precision!r}: use one of {', '.join(PRECISIONS)}"
            )

    def _install_scaler(self) -> None:
        """With float16: replace Lightning's scaler by one for steps of many batches."""
        precision: Any = self.precision_plugin
        given = getattr(precision, "scaler", None)
        if given is None or isinstance(given, shoal.GradScaler):
            return
        if self._reuse_grad_buffers and self.world_size > 1:
            raise self._flavour.misconfigured(
                "with several processes, precision 16 does not go together with reuse_grad_buffers=True: use bf16-mixed"
            )
        precision.scaler = shoal.GradScaler(
            init_scale=given.get_scale(),
            growth_factor=given.get_growth_factor(),
            backoff_factor=given.get_backoff_factor(),
            growth_interval=given.get_growth_interval(),
            enabled=given.is_enabled(),
            device=self.root_device.type,
        )

    def _check_optimizers(self) -> None:
        if len(self.optimizers) != 1:
            raise self._flavour.misconfigured(
                f"Hivemind only supports training with one optimizer. configure_optimizers returned "
                f"{len(self.optimizers)}"
            )
        if not any(p.requires_grad for group in self.optimizers[0].param_groups for p in group["params"]):
            raise self._flavour.misconfigured(
                "there is nothing to train: the optimizer of configure_optimizers has no parameter that requires "
                "gradients. Return an optimizer of parameters with requires_grad=True"
            )
        for config in self.lr_scheduler_configs:
            if isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "`ReduceLROnPlateau` is not supported with `HivemindStrategy`: its metric differs between peers. "
                    "Use a schedule that depends on steps alone"
                )

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the batch's samples; before the first batch, join the run."""
        if self._batch_size is None:
            self._batch_samples = self._count_samples(batch)
            self._samples_since_step += self._batch_samples
        if self._optimizer is None:
            self._join_run()

    def _count_samples(self, batch: Any) -> int:
        misconfiguration = self._flavour.find("utilities.exceptions", "MisconfigurationException")
        try:
            samples: int = self._flavour.find("utilities.data", "extract_batch_size")(batch)
        except (misconfiguration, RecursionError) as e:
            raise misconfiguration(
                "We tried to infer the batch size from the batch, but found no tensor in it. "
                "Please provide the batch size as an argument: `HivemindStrategy(batch_size=x)`"
            ) from e
        return samples

    def _join_run(self) -> None:
        (torch_optimizer,), module = self.optimizers, self.lightning_module
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        if self._makes_optimizer and self._scheduler_fn is None:
            warnings.warn(
                "Enabling `delay_optimizer_step`, `delay_state_averaging` or `offload_optimizer` requires a "
                "`scheduler_fn` to be passed to the strategy if the learning rate is to follow a schedule of its own. "
                "Schedulers of `configure_optimizers` are used as they are",
                stacklevel=2,
            )
        if self._scheduler_fn is not None:
            forget_schedule(torch_optimizer)
        assert module is not None
        is_single = self.world_size == 1
        make_optimizer: Any = shoal.Optimizer if is_single else shoal.MultiProcessOptimizer
        if self._steps_alone:
            make_optimizer = shoal.DiLoCo if is_single else shoal.MultiProcessDiLoCo
        optimizer: Any = make_optimizer(
            dht=self.dht,
            batch_size_per_step=self._batch_size,
            optimizer=functools.partial(move_optimizer, torch_optimizer) if self._makes_optimizer else torch_optimizer,
            params=torch_optimizer.param_groups if self._makes_optimizer else None,
            scheduler=self._scheduler_fn or joint_schedule(schedulers),
            **self._optimizer_options,
        )
        optimizer.name_parameters(module)
        self._optimizer, self.optimizers = optimizer, [optimizer]
        if not (self._steps_alone and is_single):  # a single-process DiLoCo steps whenever Lightning has clipped
            self._clipping = GradientClipping(self.precision_plugin)
            self._clipping.install(optimizer.opt)
        self._wrap_schedulers(optimizer)
        if self._reuse_grad_buffers:
            self._disable_zero_grad()
        if self._checkpoint is not None:
            optimizer.load_state_dict(self._checkpoint)
            self._checkpoint = None
        elif self._scheduler_fn is None:
            for scheduler in schedulers:  # the checkpoint of a trainer without peers has counted other steps
                take_back(scheduler, optimizer.local_epoch)
        if not self._steps_alone:  # a DiLoCo downloads by itself, and never from a peer that is behind
            optimizer.load_state_from_peers()

    def _wrap_schedulers(self, optimizer: Any) -> None:
        configs: list[Any] = self.lr_scheduler_configs
        if self._scheduler_fn is not None and configs:
            del configs[1:]
            configs[0].scheduler = optimizer.schedulers[0] if self._steps_alone else optimizer.scheduler
        for config in configs:
            config.scheduler = HiveMindScheduler(optimizer, config.scheduler)

    def _disable_zero_grad(self) -> None:
        module = self.lightning_module
        assert module is not None
        if self._flavour.find("utilities.model_helpers", "is_overridden")("optimizer_zero_grad", module):
            warnings.warn(
                "You have overridden `optimizer_zero_grad` which will be disabled. With "
                "`HivemindStrategy(reuse_grad_buffers=True)` gradients accumulate in place until the swarm steps: "
                "zeroing them would delete them before they are averaged",
                stacklevel=2,
            )
        module.__dict__["optimizer_zero_grad"] = _do_nothing
        self._zero_grad_is_off = True

    # --- training -----------------------------------------------------------------------------------------------------

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """Step, and tell the swarm's optimizer how many samples the gradients come from."""
        is_swarm = optimizer is self._optimizer
        if not is_swarm:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._batch_size is None:
            kwargs.setdefault("batch_size", self._samples_since_step or self._batch_samples)
            self._samples_of_step = kwargs["batch_size"]
        try:
            return super().optimizer_step(optimizer, functools.partial(self._run, closure), model, **kwargs)
        except _NoLossError:
            earlier = self._samples_since_step if self._batch_size is None else self._batch_size
            kwargs["batch_size"] = earlier if self._has_gradients else 0
            return super().optimizer_step(optimizer, lambda: torch.zeros((), device=self.root_device), model, **kwargs)
        finally:
            self._samples_since_step, self._has_gradients = 0, False

    def _run(self, closure: Callable[[], Any]) -> Any:
        """Run the closure, and raise if it gave no loss, because the number of samples has already been passed on."""
        loss = closure()
        if loss is None and self._is_automatic():
            raise _NoLossError
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step. A batch without a loss has no gradients, so its samples do not count."""
        output = super().training_step(*args, **kwargs)
        if output is not None:
            self._has_gradients = True
        elif self._is_automatic():
            self._samples_since_step -= self._batch_samples
        return output

    def _is_automatic(self) -> bool:
        """Whether Lightning calls ``backward``; otherwise the module does, and need not return a loss."""
        return self.lightning_module is not None and self.lightning_module.automatic_optimization

    def on_validation_start(self) -> None:
        """Validate the outer parameters, on which all peers agree, if each makes steps of its own."""
        super().on_validation_start()
        if isinstance(self._optimizer, (shoal.DiLoCo, shoal.MultiProcessDiLoCo)):
            self._optimizer.show_outer_parameters()

    def on_validation_end(self) -> None:
        """Continue training with the parameters of this peer."""
        super().on_validation_end()
        if isinstance(self._optimizer, (shoal.DiLoCo, shoal.MultiProcessDiLoCo)):
            self._optimizer.show_own_parameters()

    def on_train_end(self) -> None:
        """Apply unfinished background work to the model, in all processes of this peer."""
        super().on_train_end()
        if isinstance(self._optimizer, SeveralProcesses):
            self._optimizer.finish_background_work()
        elif isinstance(self._optimizer, shoal.DiLoCo):
            self._optimizer.show_outer_parameters()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore the optimizer: from a swarm's checkpoint when training begins, from any other checkpoint at once."""
        (state,) = checkpoint["optimizer_states"]
        if "local_epoch" in state["state"] or "shoal" in state:
            self._checkpoint = state
        else:
            super().load_optimizer_state_dict(checkpoint)

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Leave the run."""
        if self._zero_grad_is_off and self.lightning_module is not None:
            del self.lightning_module.__dict__["optimizer_zero_grad"]
            self._zero_grad_is_off = False
        if self._clipping is not None:
            self._clipping.remove()
            self._clipping = None
        try:
            if self._optimizer is not None:
                self._optimizer.shutdown()
        finally:
            if self._is_training and self.dht is not None:
                self.dht.shutdown()
            super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Not used: ``import shoal.lightning`` registers the strategy."""


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces ``optimizer_zero_grad``."""


class _NoLossError(Exception):
    """``training_step`` has returned ``None``."""
