"""The steps of one stage: when they are made, the optimizer that makes them, and clipping by the norm of all stages.

A stage is trained by a :class:`~shoal.Optimizer` or a :class:`~shoal.DiLoCo` of its own. It does not count samples to
know when to step: the host of the stage is told (:class:`DeclaredEnd`), and tells the other peers of its stage.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.bounded import Bounded
from shoal.base.logs import Seldom
from shoal.errors import BusyError, ShoalError
from shoal.optim import DiLoCo, Optimizer
from shoal.optim.options import check_run_id
from shoal.optim.progress.board import FAR_AHEAD, EpochRule
from shoal.optim.progress.records import GlobalTrainingProgress, LocalTrainingProgress
from shoal.optim.setup.training_setup import OptimizerFactory
from shoal.stages.directory import name_of_stage

if TYPE_CHECKING:
    from shoal.dht import DHT

logger = logging.getLogger(__name__)

StageOptimizer = Optimizer | DiLoCo
# The number of steps whose norms are kept for peers of other stages. Chosen: stages are at most a few steps apart.
MOST_STEPS = 8
# As in torch: keeps the factor finite.
_EPSILON = 1e-6
# Options that a stage sets itself, and why they cannot be given.
_SET_HERE = {
    "params": "they are the parameters of the stage's module",
    "model": "it is the stage's module",
    "run_id": "it follows from the run and the stage",
    "batch_size_per_step": "each microbatch has its own size",
    "auxiliary": "a peer that should only help is no stage peer",
    "reuse_grad_buffers": "a microbatch that fails would leave a part of its gradients",
    "use_local_updates": "peers of a stage would train apart: use DiLoCo to exchange less",
    "sync_every": "drivers end steps: give inner_batch_size, the samples of an inner step",
}


class DeclaredEnd(EpochRule):
    """An epoch is over when this peer's program, or another peer that is in the same epoch, says so: never by count.

    All peers then meet in the round at once.
    """

    adds_up = False
    is_listed = False  # the run of all stages is

    def __init__(self) -> None:
        self._over = -1

    def declare_over(self, epoch: int) -> None:
        """This epoch is over."""
        self._over = epoch

    def summary(
        self, progress: GlobalTrainingProgress, records: Collection[LocalTrainingProgress], now: float
    ) -> GlobalTrainingProgress:
        return replace(progress, eta_next_epoch=now + FAR_AHEAD)

    def end(
        self,
        progress: GlobalTrainingProgress,
        own: LocalTrainingProgress,
        called_end: Callable[[float], float],
        now: float,
    ) -> float:
        is_over = self._over == own.epoch or progress.epoch > own.epoch
        return now if is_over or called_end(now + FAR_AHEAD) < math.inf else now + FAR_AHEAD

    def declared_end(self, end: float, own: LocalTrainingProgress, target: int, now: float, patience: float) -> float:
        return now


def make_optimizer(
    dht: DHT,
    run_id: str,
    stage: int,
    module: torch.nn.Module,
    *,
    optimizer: OptimizerFactory,
    target_batch_size: int,
    synchronous: bool = True,
    inner_batch_size: int | None = None,
    **options: Any,
) -> StageOptimizer | None:
    """Make the optimizer of a stage.

    Args:
        optimizer: makes a torch optimizer from a list of parameters.
        target_batch_size: samples of all drivers together that make a step.
        synchronous: no microbatch arrives while peers average; otherwise averaging and the step run in the background.
        inner_batch_size: make a :class:`~shoal.DiLoCo` whose inner steps have at least this many samples.
        options: further options of :class:`~shoal.Optimizer` or :class:`~shoal.DiLoCo`.

    Returns:
        ``None`` if the module has nothing to train.

    Raises:
        ValueError, TypeError: options contradict each other.
    """
    check_run_id(run_id)
    for name in options.keys() & _SET_HERE.keys():
        if options[name]:
            raise ValueError(f"{name} cannot be given for a stage: {_SET_HERE[name]}")
        del options[name]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return None
    options["tracker_opts"] = {**(options.get("tracker_opts") or {}), "rule": DeclaredEnd()}
    shared: dict[str, Any] = {
        "dht": dht,
        "run_id": name_of_stage(run_id, stage),
        "target_batch_size": target_batch_size,
        "model": module,
    }
    if inner_batch_size is not None:
        return DiLoCo(**shared, optimizer=optimizer, params=trained, **options)
    if not synchronous:
        options = {"delay_grad_averaging": True, "delay_optimizer_step": True, "offload_optimizer": True, **options}
    if options.setdefault("offload_optimizer", False):
        return Optimizer(**shared, optimizer=optimizer, params=trained, **options)
    return Optimizer(**shared, optimizer=optimizer(trained), **options)


# --- clipping by the norm of all stages -------------------------------------------------------------------------------

GatherNorms = Callable[[int, float], float]
"""Called in the thread that steps, with the step and the squared norm of this stage's gradients; returns the sum of the
squared norms of all stages."""


def clip_by_global_norm(optimizer: StageOptimizer, max_norm: float, gather_norms: GatherNorms) -> None:
    """Let an optimizer scale its averaged gradients, so that the norm of those of all stages is at most ``max_norm``.

    Raises:
        ValueError: it is not a positive number, or the optimizer makes inner steps.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm must be a positive number, got {max_norm!r}")
    if isinstance(optimizer, DiLoCo):
        raise ValueError(
            "clip_grad_norm needs the gradients of all stages at once, but with inner_batch_size each peer makes inner "
            "steps of its own: clip in the optimizer that makes them, with register_step_pre_hook"
        )

    def clip(inner: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        grads = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
        # The epoch is that after the step.
        total = gather_norms(optimizer.local_epoch - 1, squared_norm(grads))
        factor = max_norm / (math.sqrt(total) + _EPSILON)
        if factor < 1:
            torch._foreach_mul_(grads, factor)

    optimizer.opt.register_step_pre_hook(clip)


@torch.no_grad()
def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """The sum of the squares of all values."""
    wide = [each if each.dtype.itemsize >= 4 else each.float() for each in tensors]
    if not wide:
        return 0.0
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(wide)])  # one value is waited for, not many
    return math.fsum(norm**2 for norm in norms.tolist())


class StageNorms:
    """The squared norms of the gradients of all stages, one number for each stage and step. Made in the event loop.

    :meth:`gather` is for :func:`clip_by_global_norm`, and :meth:`own` answers peers of other stages.

    Args:
        stage: of this peer.
        count: of stages.
        ask: asks a peer of another stage for its number of a step.
        seconds: a stage that gives none within this time counts with its last one.
    """

    def __init__(self, stage: int, count: int, ask: Callable[[int, int], Awaitable[float]], seconds: float) -> None:
        self._others = [other for other in range(count) if other != stage]
        self._ask, self._seconds, self._loop = ask, seconds, asyncio.get_running_loop()
        self._own: Bounded[int, asyncio.Future[float]] = Bounded(MOST_STEPS)
        self._last: dict[int, float] = {}
        self._settled = -1
        self._warn_seldom = Seldom(logger.warning)

    def gather(self, step: int, own: float) -> float:
        """The sum over all stages. Blocks: call it in another thread than that of the loop."""
        return asyncio.run_coroutine_threadsafe(self._gather(step, own), self._loop).result()

    async def _gather(self, step: int, own: float) -> float:
        known = self._future(step)
        if not known.done():
            known.set_result(own)
        norms = await asyncio.gather(*(self._norm_of(stage, step) for stage in self._others))
        return math.fsum([own, *norms])  # the same in all stages, whatever the order

    async def _norm_of(self, stage: int, step: int) -> float:
        try:
            async with asyncio.timeout(self._seconds):
                found = await self._ask(stage, step)
            if not 0 <= found < math.inf:
                raise ValueError(f"got {found}")
        except (ShoalError, TimeoutError, ValueError) as e:
            self._warn_seldom(
                "stage %d did not tell the norm of its gradients (%s): its last one counts for clipping. If this goes "
                "on, it needs faster peers",
                stage,
                e,
                about=stage,
            )
            return self._last.get(stage, 0.0)
        self._last[stage] = found
        return found

    def _future(self, step: int) -> asyncio.Future[float]:
        if step not in self._own:
            self._own[step] = self._loop.create_future()
        return self._own[step]

    def settle(self, step: int) -> None:
        """This peer makes no step up to this one any more. If it has not made one, such as after a download, peers that
        ask for its number are told so."""
        self._settled = max(self._settled, step)
        for number, known in self._own.items():
            if number <= step and not known.done():
                known.set_exception(self._unknown(number))
                known.exception()  # it need not interest anybody

    def _unknown(self, step: int) -> BusyError:
        return BusyError(f"this peer has not made step {step}")

    async def own(self, step: int) -> float:
        """This stage's number of a step, as soon as it is known. The caller has checked that the step is near.

        Raises:
            BusyError: this peer has made later steps, but not this one.
        """
        if step <= self._settled and step not in self._own:
            raise self._unknown(step)
        return await asyncio.shield(self._future(step))
