"""The options of the optimizers: defaults are filled in, contradictions refused, inherited switches become a mode.

CONTRIBUTING.md says what else an option needs.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

from shoal.access.badges import Roles, name_of
from shoal.averaging.aggregation import Aggregation, check_aggregation
from shoal.averaging.arguments import check_state_download_rate
from shoal.averaging.groups.settings import FROZEN_BASE
from shoal.compression import CompressionBase
from shoal.compression.base import check_codec
from shoal.compression.serialization import check_state_codec
from shoal.dht.dht import check_dht
from shoal.errors import NotAMemberError
from shoal.optim.grad_averager import GradientAverager, GradientAveragerFactory, check_peer_momentum
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.progress.records import count_of_samples
from shoal.optim.progress.run_settings import check_on_mismatch
from shoal.optim.setup.optimizer_state import TorchOptimizer
from shoal.optim.setup.schedules import LRSchedulerBase
from shoal.optim.setup.training_setup import default_silence

if TYPE_CHECKING:
    from shoal.dht import DHT

P = ParamSpec("P")

# The default averages gradients exactly. The error of a low-rank averager depends on the ratio of rank to layer width,
# so any fixed rank would ruin wide models.
DEFAULT_GRAD_AVERAGER: GradientAveragerFactory = GradientAverager.get_factory()


class Mode(enum.Enum):
    """What peers average, and which parts of a global step run in the background of the next batches.

    These are all sensible combinations of ``use_local_updates`` and the three switches that delay something.
    """

    SYNC = True, False, False, False
    DELAY_STATE = True, False, False, True
    DELAY_STEP = True, False, True, True
    DELAY_ALL = True, True, True, True
    LOCAL = False, False, False, False
    LOCAL_DELAY_STATE = False, False, False, True
    LOCAL_DELAY_STEP = False, False, True, False
    LOCAL_DELAY_ALL = False, False, True, True

    def __init__(self, averages_gradients: bool, delays_gradients: bool, delays_step: bool, delays_state: bool) -> None:
        self.averages_gradients = averages_gradients
        """Otherwise each peer steps at once with its own gradients, and only parameters are averaged."""
        self.delays_gradients = delays_gradients
        """The round of gradients runs in the background."""
        self.delays_step = delays_step
        """The optimizer steps in the background."""
        self.delays_state = delays_state
        """The round of parameters runs in the background."""

    @classmethod
    def of(cls, *switches: bool) -> Mode:
        """The mode with these values, in the order of the constructor's parameters."""
        return next(mode for mode in cls if mode.value == switches)

    @property
    def overlaps(self) -> bool:
        """Whether peers begin the next epoch while the first round of the global step is still running."""
        return self.delays_gradients if self.averages_gradients else self.delays_state


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """The options that all optimizers of a swarm have, resolved."""

    run_id: str
    target_batch_size: int | None
    batch_size_per_step: int | None
    matchmaking_time: float
    averaging_timeout: float
    allreduce_timeout: float
    next_chunk_timeout: float
    load_state_timeout: float
    load_state_compression: CompressionBase | None
    client_mode: bool
    auxiliary: bool
    averager_opts: Mapping[str, Any]
    tracker_opts: Mapping[str, Any]
    performance_ema_alpha: float
    shutdown_timeout: float
    status_loglevel: int
    aggregation: Aggregation | None
    frozen_base: str | None
    guard: str
    on_mismatch: str
    state_download_rate: float

    @property
    def draws_groups(self) -> bool:
        """Whether peers average in several groups, so that they train one model but do not share all rounds."""
        return bool(self.averager_opts.get("target_group_size"))

    def for_averagers(self) -> dict[str, Any]:
        """Options of every averager, except the user's own ones."""
        return {
            "min_matchmaking_time": self.matchmaking_time,
            "allreduce_timeout": self.allreduce_timeout,
            "next_chunk_timeout": self.next_chunk_timeout,
            "shutdown_timeout": self.shutdown_timeout,
            "client_mode": self.client_mode,
            "auxiliary": self.auxiliary,
            "start": False,
        }

    def own_averager_opts(self) -> dict[str, Any]:
        """The user's own options of every averager."""
        own = dict(self.averager_opts)
        if self.frozen_base is not None:
            own["agreement"] = {**(own.get("agreement") or {}), FROZEN_BASE: self.frozen_base}
        return own

    def for_tracker(self) -> dict[str, Any]:
        """Options of the progress tracker, with the user's own ones."""
        return {"performance_ema_alpha": self.performance_ema_alpha, "guard": self.guard, **self.tracker_opts}

    def check_step(self, closure: object, batch_size: int | None, grad_scaler: object) -> int:
        """Check the arguments of a step, and return the number of samples in its batch; 0 without a batch.

        Raises:
            TypeError, ValueError: an argument is invalid.
        """
        if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
            raise ValueError(f"grad_scaler must be a shoal.GradScaler, got {type(grad_scaler).__name__}")
        if self.auxiliary:
            if closure is not None or batch_size is not None or grad_scaler is not None:
                raise ValueError("an auxiliary peer has no batches: call step() without arguments")
            return 0
        batch_size = self.batch_size_per_step if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("give batch_size to step(), or batch_size_per_step to the constructor")
        if isinstance(batch_size, int) and batch_size < 0:
            raise ValueError(f"batch_size must not be negative, got {batch_size}")
        return batch_size if batch_size == 0 else count_of_samples("batch_size", batch_size)


def resolve_shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`SwarmOptions`.

    Args:
        given: the arguments of an optimizer.

    Raises:
        TypeError, ValueError, AssertionError: an option is invalid.
    """
    check_run_id(given["run_id"])
    counts = {name: given[name] for name in ("target_batch_size", "batch_size_per_step")}
    matchmaking = 15.0 if given["matchmaking_time"] is None else given["matchmaking_time"]
    patience = 60.0 if given["averaging_timeout"] is None else given["averaging_timeout"]
    allreduce, silence = given["allreduce_timeout"], given["next_chunk_timeout"]
    unchanged = (
        "run_id",
        "load_state_timeout",
        "load_state_compression",
        "auxiliary",
        "performance_ema_alpha",
        "shutdown_timeout",
        "aggregation",
        "frozen_base",
        "guard",
        "state_download_rate",
    )
    check_aggregation("aggregation", given["aggregation"])
    check_state_download_rate(given["state_download_rate"])
    return {
        **{name: given[name] for name in unchanged},
        **{name: None if count is None else count_of_samples(name, count) for name, count in counts.items()},
        "matchmaking_time": matchmaking,
        "averaging_timeout": patience,
        "allreduce_timeout": patience if allreduce is None else allreduce,
        "next_chunk_timeout": default_silence(matchmaking, patience) if silence is None else silence,
        "client_mode": _is_client(given),
        "averager_opts": dict(given["averager_opts"] or {}),
        "tracker_opts": dict(given["tracker_opts"] or {}),
        "status_loglevel": logging.INFO if given["verbose"] else logging.DEBUG,
        "on_mismatch": check_on_mismatch(given["on_mismatch"]),
    }


def _is_client(given: Mapping[str, Any]) -> bool:
    own = given["client_mode"]
    return bool(getattr(given.get("dht"), "client_mode", False) if own is None else own)


def check_run_id(run_id: object) -> None:
    """Check the name of a run.

    Raises:
        TypeError, ValueError, AssertionError: it is not a valid name.
    """
    if not isinstance(run_id, str):
        raise TypeError(f"run_id must be a text, the name of the run: got {run_id!r}")
    if not run_id:
        raise ValueError("run_id is empty: choose a name for the run. Peers with the same name train together")
    assert "." not in run_id, f"run_id must not contain dots, got {run_id!r}: use '_' instead"


def check_may_train(dht: DHT) -> None:
    """Check that this peer's token allows it to train. Otherwise it would train alone, because nobody lets it in.

    Raises:
        NotAMemberError: it does not.
    """
    membership = dht.p2p.membership
    if membership is not None and Roles.TRAIN not in membership.own.roles:
        raise NotAMemberError(
            f"the token of this peer allows: {name_of(membership.own.roles)}. It must not train: ask whoever invited "
            "you for a token with the role train (shoal token invite --role train)",
            reason="wrong role",
        )


def resolved_by(options: type[Any]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates a constructor: checks its argument ``dht``, and resolves all arguments into ``self.options``.

    Args:
        options: the class of ``self.options``.
    """

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(construct)

        @functools.wraps(construct)
        def resolve_and_construct(*args: P.args, **kwargs: P.kwargs) -> None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            check_dht(given.arguments["dht"])
            check_may_train(given.arguments["dht"])
            optimizer: Any = given.arguments["self"]
            optimizer.options = options.resolve(**{n: each for n, each in given.arguments.items() if n != "self"})
            construct(*args, **kwargs)

        return resolve_and_construct

    return decorate


def with_defaults(optimizer: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options of an optimizer, and for those that were left out the defaults of its constructor."""
    parameters = inspect.signature(optimizer.__init__).parameters  # type: ignore[misc]  # not called
    return {**{name: parameter.default for name, parameter in parameters.items()}, **given}


@dataclass(frozen=True, kw_only=True)
class Options(SwarmOptions):
    """The options of an :class:`~shoal.optim.Optimizer`, resolved."""

    target_batch_size: int
    mode: Mode
    average_state_every: int
    """Parameters are averaged once in this many epochs."""
    grad_averager_factory: GradientAveragerFactory | None
    """``None`` with local updates."""
    offload_optimizer: bool
    reuse_grad_buffers: bool
    use_ext_grad_buffer: bool
    average_opt_statistics: Sequence[str]
    grad_compression: CompressionBase | None
    state_averaging_compression: CompressionBase | None
    state_aggregation: Aggregation | None
    peer_momentum: float
    """Peers send momentum with this factor instead of gradients; 0: they do not."""
    check_state: Callable[[], object] | None

    @classmethod
    def resolve(cls, **given: Any) -> Options:
        """Resolve the arguments of the :class:`~shoal.optim.Optimizer`.

        Raises:
            TypeError: an option has a wrong type.
            ValueError, AssertionError: options contradict each other.
        """
        is_local, factory = _resolve_grad_averager(
            given["grad_averager"], given["grad_averager_factory"], given["use_local_updates"]
        )
        if is_local:
            _check_local(given)
        offload = given["offload_optimizer"]
        if offload is None:
            has_factory = given["params"] is not None and not isinstance(given["optimizer"], TorchOptimizer)
            offload = has_factory and not is_local
        delays_gradients, delays_step = given["delay_grad_averaging"], given["delay_optimizer_step"]
        delays_step = delays_gradients if delays_step is None else delays_step
        assert not delays_gradients or delays_step, (
            "delay_grad_averaging=True requires delay_optimizer_step=True: the step needs the averaged gradients"
        )
        assert not (_is_client(given) and given["auxiliary"]), (
            "an auxiliary peer must accept connections: client_mode excludes it"
        )
        assert not (given["auxiliary"] and given["batch_size_per_step"]), (
            "an auxiliary peer has no batches: leave batch_size_per_step out"
        )
        if given["average_state_every"] < 1:
            raise ValueError(f"average_state_every must be at least 1, got {given['average_state_every']}")
        _check_optimizer(given["optimizer"], given["params"], given["scheduler"], offload, delays_step)
        # Parameters are averaged after the step. With local updates the step is done by then.
        delays_state = given["delay_state_averaging"] or (delays_step and not is_local)
        for name in ("grad_compression", "state_averaging_compression"):
            check_codec(name, given[name])
        check_state_codec("load_state_compression", given["load_state_compression"])
        check_aggregation("state_aggregation", given["state_aggregation"])
        has_buffer = given["use_ext_grad_buffer"]
        return cls(
            **resolve_shared(given),
            mode=Mode.of(not is_local, delays_gradients, delays_step, delays_state),
            average_state_every=given["average_state_every"],
            grad_averager_factory=factory,
            offload_optimizer=offload,
            reuse_grad_buffers=given["reuse_grad_buffers"],
            use_ext_grad_buffer=not is_local if has_buffer is None else has_buffer,
            average_opt_statistics=given["average_opt_statistics"],
            grad_compression=given["grad_compression"],
            state_averaging_compression=given["state_averaging_compression"],
            state_aggregation=given["state_aggregation"],
            peer_momentum=check_peer_momentum(given["peer_momentum"]),
            check_state=given["check_state"],
        )

    # The inherited names, which programs read.

    @property
    def use_local_updates(self) -> bool:
        return not self.mode.averages_gradients

    @property
    def delay_grad_averaging(self) -> bool:
        return self.mode.delays_gradients

    @property
    def delay_optimizer_step(self) -> bool:
        return self.mode.delays_step

    @property
    def delay_state_averaging(self) -> bool:
        return self.mode.delays_state

    def for_gradients(self) -> dict[str, Any]:
        """Options of the averager of gradients, with the user's own ones. A user's factory may have further ones."""
        wanted = {"compression": self.grad_compression, "aggregation": self.aggregation}
        given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        if self.peer_momentum:
            given["peer_momentum"] = self.peer_momentum
        return {**given, **self.own_averager_opts()}

    def for_state(self) -> dict[str, Any]:
        """Options of the averager of parameters, with the user's own ones."""
        return {
            "aggregation": self.state_aggregation,
            "compression": self.state_averaging_compression,
            "state_compression": self.load_state_compression,
            "state_download_rate": self.state_download_rate,
            "delta_rule_averaging": not self.mode.averages_gradients and self.mode.delays_state,
            "performance_ema_alpha": self.performance_ema_alpha,
            "average_opt_statistics": self.average_opt_statistics,
            # If rounds overlap, a peer that is an epoch behind would otherwise stay behind.
            "sync_epoch_when_averaging": self.mode.overlaps,
            "check_state": self.check_state,
            **self.own_averager_opts(),
        }


def _check_local(given: Mapping[str, Any]) -> None:
    assert not given["reuse_grad_buffers"], "local updates zero the gradients: they exclude reuse_grad_buffers=True"
    assert not given["delay_grad_averaging"], (
        "with local updates no gradients are averaged: delay_grad_averaging is void"
    )
    assert not given["use_ext_grad_buffer"], (
        "with local updates there is no gradient averager: use_ext_grad_buffer is void"
    )
    for name in ("aggregation", "peer_momentum"):
        if given[name]:
            raise ValueError(
                f"with local updates no gradients are averaged: {name} is void. For parameters there is "
                "state_aggregation"
            )


def _resolve_grad_averager(
    grad_averager: Any, grad_averager_factory: Any, use_local_updates: bool
) -> tuple[bool, Callable[..., GradientAverager] | None]:
    if grad_averager is not DEFAULT_GRAD_AVERAGER and grad_averager_factory is not None:
        raise ValueError("grad_averager and grad_averager_factory are two names of the same option: give one")
    factory = grad_averager if grad_averager_factory is None else grad_averager_factory
    assert not use_local_updates or factory in (None, DEFAULT_GRAD_AVERAGER), (
        "use_local_updates=True averages no gradients: leave grad_averager out"
    )
    return (True, None) if use_local_updates else (factory is None, factory)


def _check_optimizer(optimizer: Any, params: Any, scheduler: Any, offload: bool, delayed: bool) -> None:
    if isinstance(optimizer, TorchOptimizer):
        if offload or delayed:
            raise ValueError(
                "offload_optimizer, delay_optimizer_step and delay_grad_averaging need a function that makes the "
                "optimizer from parameter groups, and params="
            )
    elif not callable(optimizer) or params is None:
        raise ValueError("give an optimizer instance, or a function that makes one together with params=")
    elif scheduler is not None and isinstance(scheduler, LRSchedulerBase):
        raise ValueError("a function that makes the optimizer needs a function that makes the scheduler, too")
    elif delayed and not offload:
        raise ValueError("delay_optimizer_step=True requires offload_optimizer=True")
