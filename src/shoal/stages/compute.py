"""The arithmetic of one stage on one device: forward, loss and backward of microbatches, and the steps of the stage.

::

    forward ─► inputs are kept, and the graph if there is room ─► backward ─► gradients are counted ─► make_step
                                              │ no room, or other parameters since
                                              └─► forward once more, with the same random numbers

All of it runs in the computing thread of the device, one job at a time, backward before forward. Steps wait for the
network, so they run in a thread of their own, while the stage computes nothing. Nothing here knows of other stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from shoal.averaging.finite import all_finite, first_not_finite
from shoal.base.bounded import Bounded
from shoal.base.clock import get_dht_time
from shoal.base.reactor import AwaitableFuture, in_thread
from shoal.base.tasks import await_cancelled
from shoal.errors import MicrobatchError, MicrobatchNotFiniteError, ReactorError
from shoal.optim import DiLoCo, Optimizer
from shoal.optim.gradient_accumulator import GradientAccumulator
from shoal.optim.progress_tracker import FIRST_LOOK_SECONDS
from shoal.serving.task_pool import JobPool
from shoal.serving.tensors import form_of, tensors_of, with_form
from shoal.stages.steps import DeclaredEnd, StageOptimizer

T = TypeVar("T")

# Priorities in the computing thread. Backward passes free memory, and others wait for them.
BACKWARD, LOSSES, FORWARD = 0.0, 0.5, 1.0
# Shapes of microbatches whose graphs have been measured. Chosen: batches of texts have many lengths.
MOST_SHAPES = 256
# How many values of each output are compared when a forward pass is repeated, and by how much of the largest one they
# may differ. Chosen: other random numbers change nearly all of them by more.
VALUES_COMPARED, ROUNDING = 64, 0.05
# Between two attempts to make a step, in seconds. Chosen: short beside a search for a group.
PAUSE_SECONDS = 0.05


class StageTask(NamedTuple):
    """A microbatch, as far as arithmetic is concerned."""

    driver: bytes
    sequence: int
    step: int
    """For whose parameters it is meant."""
    seed: int
    """Random numbers in all stages follow from it."""
    samples: int
    trains: bool = True
    """Otherwise it is for an evaluation: in eval mode, and without gradients."""

    @property
    def key(self) -> tuple[bytes, int]:
        return self.driver, self.sequence


# --- random numbers ---------------------------------------------------------------------------------------------------

# Held while torch's generators, which all threads share, have the seed of a microbatch.
_generators_in_use = threading.Lock()


class _DeviceGenerator:
    """The generator of a kind of device that has only one."""

    def __init__(self, module: Any) -> None:
        self.get_state, self.set_state = module.get_rng_state, module.set_rng_state
        self.manual_seed = module.manual_seed


def _generators_of(device: torch.device) -> list[Any]:
    """The generators that modules on this device draw from."""
    if device.type == "cpu":
        return [torch.default_generator]
    module: Any = getattr(torch, device.type)
    if not hasattr(module, "default_generators"):
        return [torch.default_generator, _DeviceGenerator(module)]
    index = module.current_device() if device.index is None else device.index
    return [torch.default_generator, module.default_generators[index]]


@contextlib.contextmanager
def seeded(seed: int, stage: int, device: torch.device) -> Iterator[None]:
    """Context in which torch draws the random numbers of a microbatch in a stage, the same in all peers. Afterwards the
    generators are as before."""
    seed = int.from_bytes(hashlib.blake2b(f"{seed} {stage}".encode(), digest_size=8).digest(), "big") >> 1
    generators = _generators_of(device)
    with _generators_in_use:
        before = [each.get_state() for each in generators]
        for each in generators:
            each.manual_seed(seed)
        try:
            yield
        finally:
            for each, state in zip(generators, before, strict=True):
                each.set_state(state)


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each in training:
            each.training = True


# --- what is kept of a microbatch -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Kept:
    """What the backward pass of a microbatch needs."""

    inputs: Any = None
    extras: Any = None
    parameters: object = None
    """Tells the parameters of the forward pass from others."""
    values: Sequence[torch.Tensor] = ()
    """Some of the outputs, to compare them when the forward pass is repeated."""
    outputs: list[torch.Tensor] | None = None
    """With their graph; ``None``: it is computed again."""
    graph_bytes: int = 0

    def drop_graph(self) -> None:
        self.outputs, self.graph_bytes = None, 0

    @property
    def nbytes(self) -> int:
        return self.graph_bytes + sum(each.nbytes for each in tensors_of([self.inputs, self.extras]))


class _SavedTensors:
    """Measures what autograd keeps, except memory that is there anyway.

    Args:
        others: tensors in that memory.
    """

    def __init__(self, others: Sequence[torch.Tensor]) -> None:
        self._others = {each.untyped_storage().data_ptr() for each in others}
        self._found: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._others:
            self._found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its own graph alive

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    @property
    def nbytes(self) -> int:
        return sum(self._found.values())


def _arguments(inputs: Any, labels: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a module is called: ``module(x)``, ``module(*x)`` or ``module(**x)``; labels come last."""
    if isinstance(inputs, dict):
        return (), inputs if labels is None else {**inputs, "labels": labels}
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    return args if labels is None else (*args, labels), {}


def _some_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    flat = [each.detach().reshape(-1) for each in tensors if each.is_floating_point()]
    return [each[:: max(1, len(each) // VALUES_COMPARED)].to(torch.float32, copy=True) for each in flat]


def _differ(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether values differ by more than rounding."""
    pairs = zip(values, others, strict=True)
    return not all(bool((a - b).abs().max() <= ROUNDING * a.abs().max()) for a, b in pairs if len(a))


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether a tensor has real and whether it has complex numbers. Only these two kinds have gradients."""
    return tensor.is_floating_point(), tensor.is_complex()


def _gradients_of(inputs: Any) -> list[torch.Tensor | None]:
    """The gradients of inputs, which need no second copy beside them."""
    leaves = tensors_of(inputs)
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return grads


def give_memory_back() -> None:
    """Let glibc give freed memory back to the system.

    The threads of a stage peer allocate and free tensors at different times, which leaves holes of 100 MB and more.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


# --- the stage --------------------------------------------------------------------------------------------------------


class StageCompute:
    """Computes one stage, and steps it together with the other peers of the stage. Made in the event loop.

    Args:
        number: of the stage, from 0.
        count: of stages.
        module: the stage. The last one takes the labels as well, and returns one loss for each sample.
        optimizer: from :func:`~.steps.make_optimizer`; ``None``: nothing is trained.
        jobs: work of the computing thread.
        keep_graphs: graphs are kept as long as they and the inputs of all microbatches take no more bytes than this.
        autocast: compute in this type, where torch considers that safe.
        inner_batch_size: samples of an inner step; only if the optimizer is a :class:`~shoal.DiLoCo`.

    Raises:
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        number: int,
        count: int,
        module: torch.nn.Module,
        optimizer: StageOptimizer | None,
        jobs: JobPool,
        *,
        keep_graphs: int = 2**30,
        autocast: torch.dtype | None = None,
        inner_batch_size: int | None = None,
    ) -> None:
        if not 0 <= number < count:
            raise ValueError(f"stage {number} of {count}: stages are counted from 0")
        if autocast is torch.float16:
            raise ValueError("autocast=torch.float16 needs scaled losses, which stages do not have: use torch.bfloat16")
        if isinstance(optimizer, DiLoCo) != (inner_batch_size is not None):
            raise ValueError("inner_batch_size belongs to a stage that is trained by DiLoCo: give both or none")
        self.number, self.count, self.module, self.optimizer = number, count, module, optimizer
        self.keep_graphs, self._autocast, self._jobs = keep_graphs, autocast, jobs
        self._parameters = [*module.parameters()]
        self._trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if (optimizer is None) != (not self._trained):
            raise ValueError("a stage has an optimizer if and only if it has parameters that require gradients")
        tensors = [*self._parameters, *module.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        rule = None if optimizer is None else optimizer.tracker.board.rule
        if rule is not None and not isinstance(rule, DeclaredEnd):
            raise ValueError("the optimizer of a stage must have a DeclaredEnd as its rule: use make_optimizer()")
        self._rule = rule
        self._inner_batch_size = inner_batch_size
        self._inner = None if inner_batch_size is None else GradientAccumulator(self._trained)
        self._epoch = 0
        # Counts changes of parameters that torch does not see, such as those by fused optimizers.
        self._changes = 0
        self._kept: dict[tuple[bytes, int], _Kept] = {}
        # By types and shapes of the inputs: the size of the graph.
        self._measured: Bounded[object, int] = Bounded(MOST_SHAPES)
        self._loop = asyncio.get_running_loop()
        self._running: set[AwaitableFuture[Any]] = set()
        self._idle, self._may_compute, self._stepping = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._idle.set()
        self._may_compute.set()
        self._closing = threading.Event()

    @property
    def epoch(self) -> int:
        """The step whose parameters this peer has."""
        return self._epoch if self.optimizer is None else self.optimizer.local_epoch

    @property
    def kept_bytes(self) -> int:
        """The memory of what is kept for backward passes."""
        return sum(each.nbytes for each in [*self._kept.values()])

    @property
    def samples(self) -> int:
        """The samples whose gradients wait for the next step."""
        waiting = 0 if self._inner is None else self._inner.samples
        return waiting + (0 if self.optimizer is None else self.optimizer.tracker.local_progress.samples_accumulated)

    # --- microbatches -------------------------------------------------------------------------------------------------

    async def forward(self, task: StageTask, inputs: Any, extras: dict[str, Any] | None = None) -> Any:
        """The outputs of a microbatch, detached. Those that need a gradient have ``requires_grad`` set.

        Args:
            inputs: a tensor, or a tuple or dictionary of arguments. Those with ``requires_grad`` get gradients.
            extras: more keyword arguments, without gradients.

        Raises:
            Exception: of the module.
        """
        kept = _Kept()
        if task.trains:
            self._kept[task.key] = kept
        try:
            return await self._compute(FORWARD, self._forward, task, kept, inputs, extras or {})
        except BaseException:
            self.forget(task)
            raise

    async def losses(
        self, task: StageTask, inputs: Any, labels: Any, extras: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """In the last stage: forward, loss and backward.

        Args:
            labels: come after the inputs, or as the argument ``labels`` if the inputs are a dictionary.

        Returns:
            The loss of each sample, and the gradient of their mean for each tensor of the inputs.

        Raises:
            MicrobatchError: it must not count, and does not, for example because a loss is not finite.
            Exception: of the module.
        """
        return await self._compute(LOSSES, self._losses, task, inputs, labels, extras or {})

    async def backward(self, task: StageTask, output_grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of a microbatch, which is forgotten afterwards; those of parameters are counted.

        Args:
            output_grads: one for each tensor of the outputs, in order; ``None`` for those without.

        Returns:
            One for each tensor of the inputs, in order; ``None`` for those without.

        Raises:
            MicrobatchError: it must not count, and does not.
            Exception: of the module.
        """
        kept = self._kept.get(task.key)
        if kept is None:
            raise MicrobatchError(f"microbatch {task.sequence} is not known here, or was forgotten")
        try:
            return await self._compute(BACKWARD, self._backward, task, kept, output_grads)
        finally:
            self.forget(task)

    def forget(self, task: StageTask) -> None:
        """Drop what is kept of a microbatch."""
        self._kept.pop(task.key, None)

    # --- in the computing thread --------------------------------------------------------------------------------------

    def _forward(self, task: StageTask, kept: _Kept, inputs: Any, extras: dict[str, Any]) -> Any:
        inputs, extras = self._arrive(inputs), self._to_device(extras)
        if not task.trains:
            with _evaluating(self.module):
                return self._detached(self._call(task, inputs, extras))
        kept.inputs, kept.extras, kept.parameters = inputs, extras, self._parameters_now()
        tensors = tensors_of([inputs, extras])
        shapes = tuple((each.dtype, each.shape) for each in tensors)
        expected = self._measured.get(shapes) if self.keep_graphs > 0 else math.inf
        if expected is not None and self.kept_bytes + expected > self.keep_graphs:
            with torch.no_grad():
                outputs = self._call(task, inputs, extras)
            kept.values = _some_values(tensors_of(outputs))
            return self._detached(outputs, may_need_grads=bool(self._trained) or any(t.requires_grad for t in tensors))
        saved = None if expected is not None else _SavedTensors([*self._parameters, *self.module.buffers(), *tensors])
        with torch.enable_grad(), contextlib.nullcontext() if saved is None else saved.measuring():
            outputs = self._call(task, inputs, extras)
        nbytes = int(expected or 0) if saved is None else saved.nbytes
        self._measured[shapes] = nbytes
        if self.kept_bytes + nbytes <= self.keep_graphs:
            kept.outputs, kept.graph_bytes = tensors_of(outputs), nbytes
        else:
            kept.values = _some_values(tensors_of(outputs))
        return self._detached(outputs)

    def _backward(
        self, task: StageTask, kept: _Kept, output_grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        are_same = kept.parameters == self._parameters_now()
        if kept.outputs is not None and are_same:
            self._go_back(task, kept.outputs, output_grads)
        else:
            kept.drop_graph()
            with self._keeping_buffers(), torch.enable_grad():
                outputs = tensors_of(self._call(task, kept.inputs, kept.extras))
                if are_same and _differ(kept.values, _some_values(outputs)):
                    raise MicrobatchError(
                        f"the forward pass of microbatch {task.sequence} has other outputs when it is repeated. Either "
                        "another thread of this process draws from torch's random generator: give it a torch.Generator "
                        "of its own. Or the module has other random numbers: give the stage a larger keep_graphs"
                    )
                self._go_back(task, outputs, output_grads)
        is_full = any(each.values for each in [*self._kept.values()])  # the graphs of these had no room
        kept.drop_graph()
        self._count(task)
        if is_full and self.device.type == "cpu":
            give_memory_back()
        return _gradients_of(kept.inputs)

    def _losses(
        self, task: StageTask, inputs: Any, labels: Any, extras: dict[str, Any]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        inputs, labels, extras = self._arrive(inputs), self._to_device(labels), self._to_device(extras)
        with torch.enable_grad() if task.trains else _evaluating(self.module):
            losses = self._call(task, inputs, extras, labels)
        if not isinstance(losses, torch.Tensor) or losses.shape != (task.samples,):
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"the last stage must return one loss for each of the {task.samples} samples, got {got}: use "
                "reduction='none', and the mean over all other dimensions"
            )
        losses = losses if losses.dtype.itemsize >= 4 else losses.float()
        if not task.trains:
            return losses, [None] * len(tensors_of(inputs))
        if not all_finite(losses.detach()):
            raise MicrobatchNotFiniteError(
                f"a loss of microbatch {task.sequence} is not finite: {losses.detach().tolist()[:8]}"
            )
        self._propagate(task, [losses.mean()] if losses.requires_grad else [])
        self._count(task)
        return losses.detach(), _gradients_of(inputs)

    def _go_back(
        self, task: StageTask, outputs: list[torch.Tensor], output_grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Backward pass from the outputs.

        Raises:
            MicrobatchError: the gradients do not fit them, or are not finite.
        """
        if len(outputs) != len(output_grads):
            raise MicrobatchError(f"{len(output_grads)} gradients for {len(outputs)} outputs of stage {self.number}")
        pairs = []
        for number, (output, grad) in enumerate(zip(outputs, output_grads, strict=True)):
            if grad is None or not output.requires_grad:
                continue
            if grad.shape != output.shape or _kind(grad) != _kind(output):
                raise MicrobatchError(
                    f"the gradient of output {number} of stage {self.number} is {grad.dtype} of shape "
                    f"{tuple(grad.shape)}, expected {tuple(output.shape)}"
                )
            pairs.append((output, grad.to(output.device, output.dtype)))
        if first_not_finite([grad for _, grad in pairs]) is not None:
            raise MicrobatchNotFiniteError(f"a gradient of the outputs of microbatch {task.sequence} is not finite")
        self._propagate(task, [output for output, _ in pairs], [grad for _, grad in pairs])

    def _propagate(
        self, task: StageTask, outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Backward pass from those outputs that need gradients.

        Raises:
            MicrobatchError: there are none, although the stage is trained.
        """
        self._forget_gradients()
        if outputs:
            torch.autograd.backward(outputs, grads)
        elif self._trained:
            raise MicrobatchError(f"no parameter of stage {self.number} has a gradient of microbatch {task.sequence}")

    def _count(self, task: StageTask) -> None:
        """Count the gradients of a microbatch.

        Raises:
            MicrobatchError: they must not count.
        """
        optimizer, samples = self.optimizer, task.samples
        if optimizer is None:
            return
        try:
            grads = [p.grad for p in self._trained if p.grad is not None]
            if first_not_finite(grads) is not None:
                raise MicrobatchNotFiniteError(
                    f"gradients of microbatch {task.sequence} are not finite in stage {self.number}"
                )
            if not grads:
                # The loss of this one does not depend on them. Its samples count in the mean, as in all other stages.
                self._trained[0].grad = torch.zeros_like(self._trained[0])
            if isinstance(optimizer, DiLoCo):
                assert self._inner is not None
                self._inner.add(samples)
                if self._inner.samples >= (self._inner_batch_size or 0):
                    self._make_inner_step(optimizer, self._inner)
                return
            # Averages of parameters would make all graphs useless, and hardly change anything.
            has_graphs = any(kept.outputs is not None for kept in [*self._kept.values()])
            may_change = not has_graphs or optimizer.options.mode.delays_step
            if not optimizer.take_batch(samples, may_change_model=may_change):
                raise MicrobatchError(
                    f"stage {self.number} cannot count microbatch {task.sequence} here: this peer is behind the others "
                    "of its stage"
                )
        finally:
            self._forget_gradients()

    def _make_inner_step(self, optimizer: DiLoCo, inner: GradientAccumulator) -> None:
        """Make an inner step with all that has been accumulated for it; or later, if this peer must catch up first."""
        means = [torch.zeros_like(parameter) for parameter in self._trained]
        inner.write_mean(means)
        for parameter, mean, has_gradient in zip(self._trained, means, inner.marks().tolist(), strict=True):
            parameter.grad = mean if has_gradient else None
        if optimizer.take_batch(inner.samples):
            inner.reset()
            self._changes += 1

    def _forget_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    def _call(self, task: StageTask, inputs: Any, extras: dict[str, Any], labels: Any = None) -> Any:
        args, kwargs = _arguments(inputs, labels)
        kind = self.device.type
        precision = torch.autocast(kind, self._autocast) if self._autocast is not None else contextlib.nullcontext()
        with seeded(task.seed, self.number, self.device), precision:
            return self.module(*args, **kwargs, **extras)

    def _arrive(self, inputs: Any) -> Any:
        """Inputs as leaves of a new graph, on the device."""
        form, tensors = form_of(inputs)
        return with_form(form, [each.detach().to(self.device).requires_grad_(each.requires_grad) for each in tensors])

    def _to_device(self, structure: Any) -> Any:
        form, tensors = form_of(structure)
        return with_form(form, [each.detach().to(self.device) for each in tensors])

    def _detached(self, outputs: Any, *, may_need_grads: bool = False) -> Any:
        """Outputs without their graph. If they have none, it is not known which of them need gradients."""
        form, tensors = form_of(outputs)
        needs = [each.requires_grad or (may_need_grads and any(_kind(each))) for each in tensors]
        return with_form(form, [each.detach().requires_grad_(n) for each, n in zip(tensors, needs, strict=True)])

    def _parameters_now(self) -> object:
        """Equal as long as the parameters are the same. Changes by torch count versions of each tensor."""
        return self._changes, [parameter._version for parameter in self._parameters]

    @contextlib.contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """A forward pass that is repeated must not change running means a second time."""
        state = self.module.state_dict(keep_vars=True).values()
        buffers = [each for each in state if not isinstance(each, torch.nn.Parameter)]
        before = [each.clone() for each in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)

    # --- the order of work --------------------------------------------------------------------------------------------

    async def _compute(self, priority: float, work: Callable[..., T], *args: Any) -> T:
        """Run work in the computing thread, unless a step is being made: then afterwards."""
        while not self._may_compute.is_set():
            await self._may_compute.wait()
        if self._closing.is_set():
            raise ReactorError(f"this peer has left stage {self.number}")
        future = self._jobs.submit(work, *args, priority=priority)
        self._running.add(future)
        self._idle.clear()
        future.add_done_callback(self._end_soon)
        return await future

    def _end_soon(self, future: Any) -> None:
        # Of a job whose caller has left, the thread may still be busy: the job ends when it has finished.
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end, future)

    def _end(self, future: AwaitableFuture[Any]) -> None:
        self._running.discard(future)
        if not self._running:
            self._idle.set()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Inside, nothing is computed: parameters may change."""
        async with self._stepping:
            self._may_compute.clear()
            try:
                await self._idle.wait()
                yield
                for kept in self._kept.values():
                    if kept.parameters != self._parameters_now():
                        kept.drop_graph()
            finally:
                self._may_compute.set()

    # --- steps --------------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Take over the newest state of the stage, and take part from now on: others wait for this peer at each step.

        Raises:
            SettingsMismatch: this peer's settings are not those of the run.
        """
        if self.optimizer is not None:
            async with self._alone():
                await self._in_thread(functools.partial(self._take_over, self.optimizer))
            self.optimizer.tracker.announce()

    async def make_step(self) -> int:
        """End the epoch: average gradients with the other peers of the stage, and step. Returns the new epoch.

        Nothing is computed meanwhile. If averaging runs in the background, that is only a moment.
        """
        optimizer = self.optimizer
        if optimizer is None:
            self._epoch += 1
            return self._epoch
        await self.end_step()
        async with self._alone():
            await self._in_thread(self._end_epoch)
        return self.epoch

    async def end_step(self) -> None:
        """Wait for the last step, if it is still made in the background."""
        if isinstance(self.optimizer, Optimizer):
            wait = self.optimizer.state_averager.wait_for_jobs
            await self._in_thread(functools.partial(wait, self.optimizer.options.averaging_timeout))

    async def flush(self) -> None:
        """Make an inner step with all that waits for one, so that it is in the next step of the stage."""
        if isinstance(self.optimizer, DiLoCo) and self._inner is not None and self._inner.samples:
            await self._compute(BACKWARD, self._make_inner_step, self.optimizer, self._inner)

    async def go_to(self, step: int) -> None:
        """Take the label of a step without making those before it, because the state of the stage is lost."""
        async with self._alone():
            if self.optimizer is None:
                self._epoch = step
            else:
                await self._in_thread(functools.partial(self.optimizer.go_to, step))

    def _take_over(self, optimizer: StageOptimizer) -> None:
        donor = optimizer.averager if isinstance(optimizer, DiLoCo) else optimizer.state_averager
        if not self.epoch:  # others would take over parameters that nobody trains
            donor.allow_state_sharing = False
        # Records may be old. If only the donor of an old copy seemed to be ahead, this peer would take that.
        optimizer.tracker.ask_others(FIRST_LOOK_SECONDS, reads=True)
        self._catch_up()
        if not self.epoch and optimizer.tracker.expected_members():
            optimizer.load_state_from_peers()  # nobody is ahead at step 0, but each has made parameters of its own
        donor.allow_state_sharing = not donor.client_mode

    def _catch_up(self) -> None:
        assert self.optimizer is not None
        while self.optimizer.catch_up() and not self._closing.wait(PAUSE_SECONDS):
            pass

    def _end_epoch(self) -> None:
        assert self.optimizer is not None
        assert self._rule is not None
        epoch = self.optimizer.local_epoch
        self._rule.declare_over(epoch)
        while self.optimizer.local_epoch == epoch and not self.optimizer.end_epoch():
            if self._closing.wait(PAUSE_SECONDS):
                return
        self._catch_up()  # others may have made it without this peer, which can count nothing until it has their state
        self._changes += isinstance(self.optimizer, Optimizer) and not self.optimizer.options.mode.delays_step

    async def _in_thread(self, work: Callable[[], T]) -> T:
        # The thread cannot be interrupted, and nothing may be computed before it has ended.
        future = asyncio.wrap_future(in_thread(work))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await await_cancelled(future)
            raise

    @property
    def is_over(self) -> bool:
        """Whether another peer of this stage makes the step of this epoch already, or has made it."""
        now = get_dht_time()
        return self.optimizer is not None and self.optimizer.tracker.board.end_of_epoch(now) <= now

    async def until_over(self) -> None:
        """Wait until :attr:`is_over`."""
        changed, loop = asyncio.Event(), self._loop

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        if self.optimizer is None:
            await changed.wait()  # never
            return
        self.optimizer.tracker.watch(wake)
        try:
            while not self.is_over:
                await changed.wait()
                changed.clear()
        finally:
            self.optimizer.tracker.unwatch(wake)

    async def close(self) -> None:
        """Leave the stage, and forget all microbatches. Idempotent."""
        self._closing.set()
        self._kept.clear()
        if self.optimizer is not None:
            await self._in_thread(self.optimizer.shutdown)
        async with self._stepping:  # this has ended the step that was being made
            pass
