"""The parameters as flat vectors of float32 numbers on the CPU: those of the model, and the outer ones.

Parameters are exchanged one *fragment* at a time. An outer optimizer moves its outer parameters, on which all peers of
a run agree (:class:`OuterState`), and a :class:`MergePolicy` brings these back into the model. Tensors that are not
trained, such as the running means of batch norms, are averaged as they are (:class:`ExtraTensors`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.averaging.state.download import Layout, layout_of
from shoal.base.logs import quoted
from shoal.compression import CompressionBase, NoCompression, RoleAdaptiveCompression, TensorRole
from shoal.compression.one_result import OneResult
from shoal.optim.setup.optimizer_state import (
    check_optimizer_state,
    dump_optimizer_state,
    initialize_optimizer_state_,
    load_optimizer_state,
    noting_state,
    statistics_of,
)
from shoal.optim.setup.schedules import (
    catch_up,
    check_received_schedule,
    check_scheduler,
    dump_scheduler_state,
    load_scheduler_state,
    scheduled_hyperparameters,
)
from shoal.optim.setup.training_setup import SchedulerFactory, check_optimizer, check_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fragment:
    """Some of the parameters, and their places in a flat vector."""

    parameters: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    """Where each parameter begins in the vector. Values between two parameters are zero."""
    length: int
    """The length of the vector."""

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor], block: int = 1) -> Fragment:
        """Lay parameters out in a vector, in their order.

        Args:
            block: codecs encode this many values together. A parameter of at least that size begins at a multiple of
                it, so that its blocks hold no values of others. Smaller ones are packed.
        """
        parameters, offsets, end = tuple(parameters), [], 0
        for parameter in parameters:
            begin = -(-end // block) * block if parameter.numel() >= block else end
            offsets.append(begin)
            end = begin + parameter.numel()
        return cls(parameters, tuple(offsets), end)

    def new_vector(self) -> torch.Tensor:
        """A vector of zeros."""
        return torch.zeros(self.length, dtype=torch.float32, device="cpu")

    def views_of(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The part of a vector that belongs to each parameter, in the shape of that parameter."""
        return [
            vector[offset : offset + parameter.numel()].view(parameter.shape)
            for parameter, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    def unchanged(self, mean: torch.Tensor) -> list[slice]:
        """The slices of the parameters that nobody has trained: their part of the mean change is zero."""
        places = [slice(n, n + p.numel()) for n, p in zip(self.offsets, self.parameters, strict=True)]
        return [place for place in places if not mean[place].any()]

    @torch.no_grad()
    def read(self, vector: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the parameters into a vector, by default a new one, and return it."""
        vector = self.new_vector() if vector is None else vector
        for view, parameter in zip(self.views_of(vector), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return vector

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Copy a vector into the parameters, rounded to their types."""
        for view, parameter in zip(self.views_of(vector), self.parameters, strict=True):
            parameter.detach().copy_(view)

    @torch.no_grad()
    def rounded(self, vector: torch.Tensor) -> torch.Tensor:
        """What :meth:`read` would return after :meth:`write`: the values as the parameters' types can hold them."""
        result = vector.clone()
        for view, parameter in zip(self.views_of(result), self.parameters, strict=True):
            if parameter.dtype not in (torch.float32, torch.float64):
                view.copy_(view.to(parameter.dtype))
        return result


class Fragments(Sequence[Fragment]):
    """All trained parameters, each in exactly one fragment.

    Args:
        parameters: those that the inner optimizers train. Duplicates count once. Parameters without gradients or values
            do not count.
        fragments: how many fragments of about the same size; or for each fragment, the parameters that belong to it.
            Parameters that no fragment names go to the smallest ones.
        block: how many values codecs encode together, see :meth:`Fragment.of`.

    Raises:
        TypeError, ValueError: they cannot be divided like that.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        fragments: int | Sequence[Iterable[torch.Tensor]] = 1,
        block: int = 1,
    ) -> None:
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        check_parameters(unique)
        trained = [parameter for parameter in unique if parameter.requires_grad and parameter.numel()]
        if not trained:
            raise ValueError("no parameter requires gradients: there is nothing to train")
        for index, parameter in enumerate(unique):
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(f"parameter {index} is of type {parameter.dtype}: only real numbers can be averaged")
        chosen = divide(unique, trained, fragments)
        position = {id(parameter): index for index, parameter in enumerate(trained)}
        places = [sorted(position[id(parameter)] for parameter in each) for each in chosen]
        self._fragments = [Fragment.of((trained[index] for index in each), block) for each in places]
        self._description = ";".join(
            ",".join(f"{index}:{tuple(trained[index].shape)}" for index in each) for each in places
        )

    def __len__(self) -> int:
        return len(self._fragments)

    def __getitem__(self, index: int) -> Fragment:  # type: ignore[override]
        return self._fragments[index]

    @property
    def fingerprint(self) -> str:
        """A hash of the layout. It differs if peers have other parameters in a fragment, or the same at other
        places."""
        layout = ";".join(f"{each.offsets}:{each.length}" for each in self._fragments)
        return hashlib.sha256(f"{self._description}|{layout}".encode()).hexdigest()[:16]


def divide(
    all_parameters: Sequence[torch.Tensor],
    trained: Sequence[torch.Tensor],
    fragments: int | Sequence[Iterable[torch.Tensor]],
) -> list[list[torch.Tensor]]:
    """The parameters of each fragment, in any order.

    Args:
        all_parameters: those of the inner optimizers, each once.
        trained: the exchanged ones of these.
        fragments: see :class:`Fragments`.

    Raises:
        ValueError: they cannot be divided like that.
    """
    known, given = {id(p) for p in trained}, {id(p) for p in all_parameters}
    if isinstance(fragments, int):
        if fragments < 1:
            raise ValueError(f"there must be at least 1 fragment, got {fragments}")
        chosen: list[list[torch.Tensor]] = [[] for _ in range(fragments)]
    else:
        chosen = []
        named: set[int] = set()
        for number, each in enumerate(fragments):
            own = list({id(parameter): parameter for parameter in each}.values())
            for parameter in own:
                if id(parameter) in named:
                    raise ValueError(f"a parameter of fragment {number} is in another fragment, too: name it once")
                if id(parameter) not in given and getattr(parameter, "requires_grad", True):
                    raise ValueError(
                        f"fragment {number} names a parameter that no inner optimizer trains: leave it out, or give it "
                        "to the optimizer"
                    )
            named.update(map(id, own))
            chosen.append([parameter for parameter in own if id(parameter) in known])
    placed = {id(parameter) for each in chosen for parameter in each}
    sizes = [sum(parameter.numel() for parameter in each) for each in chosen]
    rest = [parameter for parameter in trained if id(parameter) not in placed]
    for parameter in sorted(rest, key=lambda p: -p.numel()):  # sorting keeps the order of equal ones
        emptiest = min(range(len(sizes)), key=lambda index: sizes[index])
        chosen[emptiest].append(parameter)
        sizes[emptiest] += parameter.numel()
    if not all(chosen):
        raise ValueError(
            f"{len(chosen)} fragments of {len(trained)} parameters: fragment {chosen.index([])} would be empty: use "
            "fewer"
        )
    return chosen


def strided_fragments(modules: Iterable[torch.nn.Module], fragments: int) -> list[list[torch.Tensor]]:
    """Divide the blocks of a model evenly: block i goes to fragment ``i % fragments``.

    Args:
        modules: the blocks, in order. What they do not contain, such as embeddings, goes to the smallest fragment.
        fragments: how many fragments to make.

    Returns:
        For each fragment its parameters, for ``fragments=`` of the optimizer.

    Raises:
        ValueError: there are fewer blocks than fragments.
    """
    blocks = list(modules)
    if not 1 <= fragments <= len(blocks):
        raise ValueError(f"{len(blocks)} blocks can be divided into 1 to {len(blocks)} fragments, not {fragments}")
    chosen: list[list[torch.Tensor]] = [[] for _ in range(fragments)]
    placed: set[int] = set()
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            if id(parameter) not in placed:  # blocks may share parameters
                placed.add(id(parameter))
                chosen[index % fragments].append(parameter)
    return chosen


ROLE = TensorRole.UNSPECIFIED
"""The role of the vector of extra tensors. That of a fragment's vector is for gradients."""


class ExtraTensors:
    """Some tensors that are averaged in the rounds of the first fragment, as one flat vector of float32 numbers.

    Args:
        tensors: in the same order at all peers.
        trained: the parameters that are exchanged anyway.

    Raises:
        TypeError, ValueError: they cannot be averaged.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], trained: Iterable[torch.Tensor] = ()) -> None:
        given, known = tuple(tensors), {id(parameter) for parameter in trained}
        for index, tensor in enumerate(given):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"extra_tensors must be tensors, but number {index} is a {type(tensor).__name__}")
            if id(tensor) in known:
                raise ValueError(
                    f"extra tensor {index} is a parameter that the inner optimizer has, too, so that it is exchanged "
                    "anyhow: leave it out"
                )
            if tensor.is_complex() or tensor.dtype == torch.bool:
                raise ValueError(f"extra tensor {index} is of type {tensor.dtype}: only real numbers can be averaged")
            if tensor.grad_fn is not None:
                raise ValueError(f"extra tensor {index} is a result of a computation: give .detach() of it")
        self._fragment = Fragment.of(given)

    def __bool__(self) -> bool:
        return self.length > 0

    @property
    def length(self) -> int:
        """The length of the vector."""
        return self._fragment.length

    def read(self, vector: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the tensors into a vector, by default a new one, and return it."""
        return self._fragment.read(vector)

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Copy a vector into the tensors, rounded to their types."""
        for view, tensor in zip(self._fragment.views_of(vector), self._fragment.parameters, strict=True):
            tensor.copy_(view if tensor.is_floating_point() else view.round())

    def load(self, tensors: list[torch.Tensor]) -> None:
        """Take over the vector of another peer.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        match tensors:
            case [vector] if vector.shape == (self.length,) and bool(torch.isfinite(vector).all()):
                self.write(vector)
            case _:
                raise ValueError(f"the extra tensors are not {self.length} finite numbers")

    def codec(self, of_fragments: CompressionBase) -> CompressionBase:
        """The codec of all vectors, with this one for fragments. Extra tensors are sent without loss, because nobody
        keeps an error for them."""
        return RoleAdaptiveCompression(gradient=of_fragments, default=OneResult(NoCompression()))


REBASE = "rebase"


@dataclass(frozen=True)
class MergePolicy:
    """How new outer parameters are merged into the model.

    Raises:
        ValueError: there is no such policy.
    """

    alpha: float | str
    """The weight of the local values: 0 replaces them, 1 leaves the model alone. ``"rebase"`` adds the change that the
    exchange has made, so that the model keeps its progress since."""

    def __post_init__(self) -> None:
        if self.alpha == REBASE:
            return
        is_number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        if not is_number or not 0 <= self.alpha <= 1:  # type: ignore[operator]
            raise ValueError(f'fragment_update_alpha must be a number from 0 to 1, or "{REBASE}": got {self.alpha!r}')

    @classmethod
    def choose(cls, alpha: float | str | None, delay: int | None) -> MergePolicy:
        """The user's policy, or the default.

        Args:
            alpha: of the policy; ``None``: the default.
            delay: the inner steps between sending and applying; ``None``: as many as the exchange takes.
        """
        if alpha is None:
            alpha = 0.0 if delay == 0 else REBASE
        return cls(alpha)

    @property
    def is_rebase(self) -> bool:
        """Whether local progress since sending is kept in full."""
        return self.alpha == REBASE

    @torch.no_grad()
    def apply(self, fragment: Fragment, outer: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Bring new outer parameters into the model.

        Args:
            outer: the outer parameters.
            sent: the model's parameters when they were sent; ``None``: they have not changed since. Only ``"rebase"``
                needs them.
        """
        if self.alpha == 0 or (self.is_rebase and sent is None):
            fragment.write(outer)
        elif self.is_rebase:
            assert sent is not None
            shift(fragment, fragment.rounded(outer), sent)
        elif self.alpha != 1:
            assert isinstance(self.alpha, (int, float))
            local = fragment.read()
            fragment.write(local.mul_(self.alpha).add_(fragment.rounded(outer).mul_(1 - self.alpha)))


@torch.no_grad()
def shift(fragment: Fragment, to: torch.Tensor, start: torch.Tensor) -> None:
    """Move the model by the difference of two vectors."""
    fragment.write(fragment.read().add_(to - start))


# --- outer parameters -------------------------------------------------------------------------------------------------

OuterOptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class SteadySGD(torch.optim.SGD):
    """SGD whose step has the same bits on all machines, as all peers must.

    Torch's own step fuses multiplications and additions on some processors and not on others.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step with the gradients that the parameters have. A closure is refused: there is no loss."""
        assert closure is None, "an outer step has no loss that a closure could compute"
        for group in self.param_groups:
            rate, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                change = grad.neg() if group["maximize"] else grad
                if decay:
                    change = change + parameter * decay
                if momentum:
                    change = self._with_momentum(parameter, change, group)
                parameter.sub_(change * rate)

    def _with_momentum(self, parameter: torch.Tensor, change: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        momentum, state = group["momentum"], self.state[parameter]
        buffer: torch.Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = change.clone()
        else:
            fresh = change * (1 - group["dampening"]) if group["dampening"] else change
            buffer.mul_(momentum).add_(fresh)
        return change + buffer * momentum if group["nesterov"] else buffer


def default_outer_optimizer(average: str, *, is_sparse: bool = False) -> OuterOptimizerFactory:
    """The outer optimizer unless the user chooses one.

    Args:
        average: what peers average, ``"pseudo_gradients"`` or ``"parameters"``. With the latter, high momentum ruins
            training.
        is_sparse: peers send only few values, which are late; momentum would carry them further.
    """
    if average == "parameters":
        return partial(torch.optim.SGD, lr=0.7, momentum=0.5)
    if is_sparse:
        return partial(torch.optim.SGD, lr=0.7)
    return partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


# With more momentum than this, averages of parameters and sparse messages trained worse than one peer alone: measured
# by benchmarks/low_communication.py.
MOST_MOMENTUM = 0.5


def warn_of_momentum(optimizers: Iterable[torch.optim.Optimizer], average: str, *, is_sparse: bool) -> None:
    """Warn once of more momentum than this way of averaging tolerates."""
    most = max((group.get("momentum", 0.0) for each in optimizers for group in each.param_groups), default=0.0)
    if most > MOST_MOMENTUM and (is_sparse or average == "parameters"):
        logger.warning(
            "the outer optimizer has a momentum of %g, which ruins training with %s: use %g or less",
            most,
            "sparse messages" if is_sparse else "average='parameters'",
            MOST_MOMENTUM,
        )


def make_outer_optimizer(factory: OuterOptimizerFactory, parameter: torch.Tensor) -> torch.optim.Optimizer:
    """Let the user's function make an optimizer for one vector of outer parameters.

    Raises:
        TypeError, ValueError: it makes something else.
    """
    optimizer = factory([parameter])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"outer_optimizer must be a function that makes a torch optimizer from parameters, such as "
            f"functools.partial(torch.optim.SGD, lr=0.7): it returned a {type(optimizer).__name__}"
        )
    given = [each for group in optimizer.param_groups for each in group["params"]]
    if len(given) != 1 or given[0] is not parameter:
        raise ValueError("outer_optimizer must give its optimizer the parameters that it gets, and no others")
    check_optimizer(optimizer)
    if type(optimizer) is not torch.optim.SGD:
        return optimizer
    (group,) = optimizer.param_groups
    steady = SteadySGD([parameter], lr=group["lr"])
    steady.defaults.update(optimizer.defaults)
    steady.param_groups[0].update(group)
    return steady


class OuterState:
    """Outer parameters of a fragment, which an outer optimizer moves.

    They are float32 numbers on the CPU for any type of model, and have gradients of their own: the model's gradients
    are never touched.

    Args:
        values: the outer parameters at the beginning of the run; taken over, not copied.
        factory: makes the outer optimizer.
        make_schedule: makes a schedule of its learning rate over versions; ``None``: the rate is constant.

    Raises:
        TypeError, ValueError: one of them makes something else.
    """

    def __init__(
        self, values: torch.Tensor, factory: OuterOptimizerFactory, make_schedule: SchedulerFactory | None = None
    ) -> None:
        assert values.dtype == torch.float32, f"outer parameters are float32, got {values.dtype}"
        self.parameter = torch.nn.Parameter(values)
        self.optimizer = make_outer_optimizer(factory, self.parameter)
        initialize_optimizer_state_(self.optimizer)
        self.scheduler = None if make_schedule is None else make_schedule(self.optimizer)
        if self.scheduler is not None:
            check_scheduler(self.scheduler)
        self.version = 0
        """How many outer updates the parameters contain."""

    @property
    def values(self) -> torch.Tensor:
        """The outer parameters, without autograd. Do not change them."""
        return self.parameter.detach()

    def step(self, mean: torch.Tensor, left_alone: Sequence[slice] = ()) -> None:
        """Make an outer update.

        Args:
            mean: the mean of the peers' pseudo-gradients; it points away from where the peers have moved.
            left_alone: slices of parameters that nobody has trained. These and their statistics stay as they are, as
                for parameters without gradients in torch.
        """
        per_value = [self.values] + [
            statistic
            for statistic in self.optimizer.state.get(self.parameter, {}).values()
            if isinstance(statistic, torch.Tensor) and statistic.shape == self.parameter.shape
        ]
        kept = [(tensor[where], tensor[where].clone()) for tensor in per_value for where in left_alone]
        self.parameter.grad = mean
        try:
            with noting_state(self.optimizer):
                self.optimizer.step()
        finally:
            self.parameter.grad = None
        with torch.no_grad():
            for place, before in kept:
                place.copy_(before)
        self.version += 1
        if self.scheduler is not None:
            catch_up(self.scheduler, self.version)

    # --- for newcomers and checkpoints --------------------------------------------------------------------------------

    def dump(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The state as plain values and tensors. The tensors are not copied."""
        metadata, tensors = dump_optimizer_state(self.optimizer)
        schedule = dump_scheduler_state(self.scheduler)
        return {"version": self.version, "optimizer": metadata, "scheduler": schedule}, [self.values, *tensors]

    @property
    def layout(self) -> Layout:
        """The shapes and types of the tensors of :meth:`dump`."""
        return layout_of([self.values, *statistics_of(self.optimizer)])

    def check(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Check that a state from :meth:`dump` of another peer fits.

        Raises:
            ValueError: it does not; nothing has been changed.
        """
        if not isinstance(metadata, Mapping) or not isinstance(version := metadata.get("version"), int) or version < 0:
            raise ValueError(f"the state of a fragment has no version: {quoted(metadata)}")
        if not tensors or tensors[0].shape != self.values.shape or tensors[0].dtype != torch.float32:
            raise ValueError(f"outer parameters must be {tuple(self.values.shape)} float32 numbers")
        for tensor in tensors:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError("outer parameters, or the state of their optimizer, are not finite")
        check_optimizer_state(self.optimizer, metadata.get("optimizer"), tensors[1:])
        groups = metadata["optimizer"]["groups"]
        check_received_schedule(self.scheduler, metadata.get("scheduler"), groups, metadata["version"])

    def load(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Take over a state from :meth:`dump`. The tensors are copied.

        Raises:
            ValueError: it does not fit; nothing has been changed.
        """
        self.check(metadata, tensors)
        with torch.no_grad():
            self.values.copy_(tensors[0])
        scheduled = scheduled_hyperparameters(self.scheduler)
        load_optimizer_state(self.optimizer, metadata["optimizer"], tensors[1:], scheduled)
        load_scheduler_state(self.scheduler, metadata.get("scheduler"), of_others=True)
        self.version = metadata["version"]
