"""Compares what must be equal in all peers but is never averaged: learning rates, and tensors outside the optimizer.

Each round of gradients carries a short description of them, which members compare. Nothing is changed: each kind of
difference is reported once, with what to do about it. To find the tensors, the module that contains the parameters is
looked up.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.compression.base import plain_name
from shoal.optim.setup.devices import is_dtensor
from shoal.optim.setup.training_setup import unwrapped
from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)

Named = list[tuple[str, torch.Tensor]]

_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass
class OtherTensors:
    """The tensors of a model that the optimizer does not have, with their names. Buffers that are not floating point
    are left out, such as counters and masks."""

    trained: Named = field(default_factory=list)
    """Parameters that require gradients; another optimizer may train them, or none."""
    frozen: Named = field(default_factory=list)
    """Parameters that do not require gradients."""
    buffers: Named = field(default_factory=list)
    """Buffers that are part of checkpoints, such as running means of batch norms."""
    names: tuple[str, ...] = ()
    """The names of the optimizer's parameters, in its order; empty if the model does not name all of them."""

    @classmethod
    def find(
        cls,
        model: torch.nn.Module | None,
        parameters: Sequence[torch.Tensor],
        extra_tensors: Sequence[torch.Tensor],
    ) -> OtherTensors:
        """Find the tensors of the model that are neither parameters of the optimizer nor extra tensors.

        Args:
            model: the model; ``None`` = the modules that contain the parameters.

        Raises:
            TypeError, ValueError: it is not a model, or cannot be trained together with others.
        """
        if not isinstance(model, torch.nn.Module | None):
            raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
        owners, modules = owners_of(parameters, None if model is None else list(model.modules()))
        _check_modules(owners)
        if model is None and not owners and gc.get_freeze_count():
            logger.warning(
                "no module was found that has the parameters (was gc.freeze() called?), so nothing checks whether "
                "peers fit. Give shoal the module: model=..."
            )
        models = list(map(unwrapped, outermost(modules) if model is None else [model]))
        found = cls.of(models, [*parameters, *extra_tensors])
        found.names = _names_of(parameters, models)
        return found

    @classmethod
    def of(cls, models: Iterable[torch.nn.Module], known: Iterable[torch.Tensor]) -> OtherTensors:
        """The tensors of these models, without the known ones."""
        found, seen = cls(), {id(tensor) for tensor in known}
        for model in models:
            for prefix, module in model.named_modules():
                start = plain_name(f"{prefix}.") if prefix else ""
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        (found.trained if parameter.requires_grad else found.frozen).append((start + name, parameter))
                for name, buffer in module._buffers.items():
                    is_kept = name not in module._non_persistent_buffers_set
                    if buffer is not None and is_kept and buffer.is_floating_point() and id(buffer) not in seen:
                        seen.add(id(buffer))
                        found.buffers.append((start + name, buffer))
        return found

    def leave_at_home(self, base: str, *, buffers: bool) -> None:
        """Do not compare the frozen parameters by value: peers compare the name of the base instead.

        Args:
            base: the name of the base.
            buffers: whether all buffers belong to the base, too.

        Raises:
            TypeError, ValueError: this is no name.
        """
        if not isinstance(base, str):
            raise TypeError(f"frozen_base must be a text that names the frozen model, got {base!r}")
        if not base:
            raise ValueError("frozen_base is empty: give the frozen model a name, or leave frozen_base out")
        self.frozen = []
        if buffers:
            self.buffers = []

    def take_what_changes(self) -> Named:
        """Remove the tensors that may change during training from the remainder, and return them to be averaged."""
        changing = [*self.trained, *self.buffers]
        self.trained, self.buffers = [], []
        return changing


def _names_of(parameters: Sequence[torch.Tensor], models: Iterable[torch.nn.Module]) -> tuple[str, ...]:
    known = {id(parameter): name for model in models for name, parameter in model.named_parameters()}
    names = tuple(known.get(id(parameter), "") for parameter in parameters)
    return names if all(names) else ()


def owners_of(
    parameters: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module] | None
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that own any of these parameters, and these together with all modules that contain them.

    Args:
        modules: the modules to search. ``None`` = all: an optimizer does not know the modules of its parameters, so
            this goes through all objects of the process, which takes a few hundredths of a second.
    """
    if modules is None:
        modules = _objects_of(_kinds_of_modules())
    wanted = {id(parameter) for parameter in parameters}
    parents: dict[int, list[torch.nn.Module]] = {}
    owners = []
    for module in modules:
        contents = vars(module)
        for child in contents.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
        if any(id(parameter) in wanted for parameter in contents.get("_parameters", {}).values()):
            owners.append(module)
    found, seen = list(owners), {id(module) for module in owners}
    for module in found:  # the list grows during the loop
        above = [parent for parent in parents.get(id(module), ()) if id(parent) not in seen]
        seen.update(map(id, above))
        found += above
    return owners, found


def _objects_of(kinds: Collection[type]) -> list[Any]:
    """All objects of these types.

    The collector also knows tuples that another thread is still making, and Python refuses to finish a tuple that
    somebody else holds meanwhile. So no other thread may run until all but the wanted objects are let go: this is a
    single call of ``list``, in which only compiled functions run, and no collection whose callbacks are Python.
    """
    # tee() keeps the last objects that it has given: let these be nothing. It is called when everything is listed, so
    # that its own memory is not part of that, which would be a cycle.
    padded = map(itertools.chain, map(gc.get_objects, [None]), [[None] * 1000])
    one, other = itertools.tee(map(itertools.tee, padded))
    found = itertools.chain.from_iterable(map(operator.itemgetter(0), one))
    again = itertools.chain.from_iterable(map(operator.itemgetter(1), other))
    wanted = itertools.compress(found, map(kinds.__contains__, map(type, again)))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return list(wanted)
    finally:
        if was_enabled:
            gc.enable()


def _kinds_of_modules() -> set[type]:
    kinds: set[type] = {torch.nn.Module}
    new: list[type] = [torch.nn.Module]
    while new:
        below: list[list[type]] = [kind.__subclasses__() for kind in new]
        new = [kind for subclasses in below for kind in subclasses if kind not in kinds]
        kinds.update(new)
    return kinds


def outermost(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that no other module contains."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


# How many values represent a tensor in its hash. Chosen: different weights differ in nearly all of them.
SAMPLES_PER_TENSOR = 16
# Learning rates that differ by more than this share count as different. Chosen: rounding differs by less.
LEAST_DIFFERENCE = 1e-6
# The most epochs between members of a round. A peer that is further behind downloads a state instead.
MOST_EPOCHS_APART = 1

# Short, because the line that ends with it has to fit into two lines of a terminal.
_SCHEDULE_ADVICE = "Pass the schedule as scheduler=lambda opt: ..., and do not step it yourself"
_TENSOR_ADVICE = {
    "trained": "Give shoal.Optimizer model=model",
    "frozen": "Load the same weights in all peers",
    "buffers": "Give shoal.Optimizer model=model",
}
_NAMES = {"trained": "parameters", "frozen": "frozen parameters", "buffers": "buffers"}


class ConsistencyCheck:
    """Compares this peer's learning rates and tensors with the descriptions of others.

    Args:
        state_averager: has the optimizer.
        remainder: tensors of the model that are neither averaged nor given to newcomers.
        compares_rates: whether to compare learning rates; not with local updates, where peers step at their own pace.
    """

    def __init__(self, state_averager: TrainingStateAverager, remainder: OtherTensors, compares_rates: bool) -> None:
        self._state_averager, self._compares_rates = state_averager, compares_rates
        every: dict[str, Named] = {name: getattr(remainder, name) for name in _NAMES}
        # A process alone cannot read tensors that several share. What is not described is not compared.
        self._remainder = {n: named for n, named in every.items() if not any(is_dtensor(tensor) for _, tensor in named)}
        self._digests: dict[str, tuple[list[int], bytes]] = {}
        # The description that the others got last.
        self._described: dict[str, Any] = {}
        self._told: set[str] = set()
        self._rates_after_batch: tuple[int, list[float]] | None = None

    # --- with other peers ---------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Describe everything that must be equal, as plain values for the other members of a group."""
        rates = self._state_averager.learning_rates() if self._compares_rates else None
        description: dict[str, Any] = {name: self._digest(name, named) for name, named in self._remainder.items()}
        description["epoch"] = self._state_averager.local_epoch
        if rates is not None:
            description |= {"stepped_epoch": rates[0], "rates": rates[1]}
        self._described = description
        return description

    def epoch_of(self, description: object) -> int:
        """A member's epoch in a round, from its description; this peer's own epoch if that is implausible."""
        own = self._state_averager.local_epoch
        given = description.get("epoch") if isinstance(description, dict) else None
        return given if isinstance(given, int) and abs(given - own) <= MOST_EPOCHS_APART else own

    def _digest(self, name: str, named: Named) -> bytes:
        tensors = [tensor for _, tensor in named]
        versions = [tensor._version for tensor in tensors]
        known, digest = self._digests.get(name, (None, b""))
        if known != versions:
            digest = _digest(tensors)
            self._digests[name] = versions, digest
        return digest

    def compare(self, gathered: Mapping[PeerID, Any], own_id: PeerID) -> None:
        """Warn of differences from other members of a group."""
        own = self._described
        for peer, theirs in gathered.items():
            if peer != own_id and isinstance(theirs, dict):
                self._compare_rates(peer, own, theirs)
                for name, named in self._remainder.items():
                    given = theirs.get(name)
                    if named and isinstance(given, bytes) and given != own.get(name):
                        self._tell_difference(name, peer, named)

    def _compare_rates(self, peer: PeerID, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        if "rates" not in own or "rates" in self._told:
            return
        if any(own[name] != theirs.get(name) for name in ("epoch", "stepped_epoch")):
            return
        mine, other = own["rates"], theirs.get("rates")
        if not isinstance(other, list) or not all(isinstance(rate, float) for rate in other):
            return
        if len(other) == len(mine) and _differ(mine, other):
            self._told.add("rates")
            logger.warning(
                "in epoch %d the learning rate is %s here and %s at peer %s. %s",
                own["epoch"],
                _written(mine),
                _written(other),
                peer,
                _SCHEDULE_ADVICE,
            )

    def _tell_difference(self, name: str, peer: PeerID, named: Named) -> None:
        if name not in self._told:
            self._told.add(name)
            names = [given for given, _ in named]
            logger.warning(
                "%s that the optimizer does not have differ between this peer and %s: %d, such as %s. %s",
                _NAMES[name],
                peer,
                len(names),
                ", ".join(names[:2]),
                _TENSOR_ADVICE[name],
            )

    # --- from batch to batch ------------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """Warn if the learning rate has changed since the last batch although no epoch has begun."""
        before, self._rates_after_batch = self._rates_after_batch, None
        if before is None or "rates" in self._told:
            return
        now = self._state_averager.learning_rates()
        if now is not None and now[0] == before[0] and _differ(before[1], now[1]):
            self._told.add("rates")
            logger.warning(
                "the learning rate has changed from %s to %s within epoch %d, so it differs between peers. %s",
                _written(before[1]),
                _written(now[1]),
                self._state_averager.local_epoch,
                _SCHEDULE_ADVICE,
            )

    def after_batch(self, epoch_began: bool) -> None:
        """Remember the learning rates: a user may change them between two epochs, but not within one."""
        if self._compares_rates and not epoch_began and "rates" not in self._told:
            self._rates_after_batch = self._state_averager.learning_rates()


def _differ(rates: Sequence[float], others: Sequence[float]) -> bool:
    return len(rates) != len(others) or not all(
        math.isclose(rate, other, rel_tol=LEAST_DIFFERENCE) for rate, other in zip(rates, others, strict=True)
    )


def _written(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


@torch.no_grad()
def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    """A hash of the shapes and some of the values."""
    description = hashlib.sha256(str([tuple(tensor.shape) for tensor in tensors]).encode())
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        samples = [_some_values(tensor.detach()) for tensor in tensors if tensor.device == device]
        description.update(torch.cat(samples).cpu().numpy().tobytes())
    return description.digest()


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return values[:: max(1, values.numel() // SAMPLES_PER_TENSOR)][:SAMPLES_PER_TENSOR].float()


def _check_modules(modules: Iterable[Any]) -> None:
    """Check that the modules of the parameters make dense gradients.

    Raises:
        ValueError: one of them makes sparse gradients.
    """
    for module in modules:
        if isinstance(module, _SPARSE_MODULES) and module.sparse:
            raise ValueError(
                f"{module} makes sparse gradients, and averages of several peers are dense: make it with sparse=False"
            )
