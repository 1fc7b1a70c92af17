"""What must be the same in all peers although nothing averages it: learning rates, and tensors that no optimizer has.

Each round of gradients carries a few words about them, which are compared with those of the others. Nothing is changed:
whatever differs is told once, with what to do about it. To find them, the model is looked for that the parameters
belong to.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shoal.p2p import PeerID

if TYPE_CHECKING:
    from shoal.optim.state_averager import TrainingStateAverager

logger = logging.getLogger(__name__)

Named = list[tuple[str, torch.Tensor]]

_SPARSE_MODULES = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass
class Remainder:
    """The tensors of a model that the optimizer does not have, with their names. Numbers that are not real are not
    among them: counters, masks and the like."""

    trained: Named = field(default_factory=list)
    """Parameters that require gradients: somebody else moves them, or nobody."""
    frozen: Named = field(default_factory=list)
    """Parameters that nobody moves."""
    buffers: Named = field(default_factory=list)
    """Such as running means of batch norms. Without those that are not part of checkpoints."""

    @classmethod
    def find(
        cls,
        model: torch.nn.Module | None,
        parameters: Sequence[torch.Tensor],
        extra_tensors: Sequence[torch.Tensor],
    ) -> Remainder:
        """What belongs to the parameters of an optimizer, and is neither among them nor among the extra tensors.

        Args:
            model: to look into; ``None`` = whatever contains the parameters.

        Raises:
            TypeError, ValueError: the model is none, or cannot be trained together with others.
        """
        if not isinstance(model, torch.nn.Module | None):
            raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
        owners, modules = owners_of(parameters, None if model is None else list(model.modules()))
        _check_modules(owners)
        if model is None and not owners and gc.get_freeze_count():
            logger.warning(
                "no module was found that the parameters belong to, perhaps because this program has called "
                "gc.freeze(): whether it can be trained with others is not checked. Give shoal the module: model=..."
            )
        return cls.of(outermost(modules) if model is None else [model], [*parameters, *extra_tensors])

    @classmethod
    def of(cls, models: Iterable[torch.nn.Module], known: Iterable[torch.Tensor]) -> Remainder:
        """What these models have beside the known tensors."""
        found, seen = cls(), {id(tensor) for tensor in known}
        for model in models:
            for prefix, module in model.named_modules():
                start = f"{prefix}." if prefix else ""
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

    def take_what_changes(self) -> list[torch.Tensor]:
        """What may change while others train, which is no part of the remainder any more: it is taken care of."""
        changing = [tensor for _, tensor in [*self.trained, *self.buffers]]
        self.trained, self.buffers = [], []
        return changing


def owners_of(
    parameters: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module] | None
) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that any of these parameters belongs to, and those together with all that contain them.

    Args:
        modules: to look at. ``None`` = all that there are: nobody tells an optimizer what its parameters are part of,
            so this looks through all objects of the process, which takes some hundredths of a second.
    """
    if modules is None:
        kinds = _kinds_of_modules()
        modules = [thing for thing in gc.get_objects() if type(thing) in kinds]
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
    for module in found:  # grows while it is gone through
        above = [parent for parent in parents.get(id(module), ()) if id(parent) not in seen]
        seen.update(map(id, above))
        found += above
    return owners, found


def _kinds_of_modules() -> set[type]:
    kinds: set[type] = {torch.nn.Module}
    new: list[type] = [torch.nn.Module]
    while new:
        below: list[list[type]] = [kind.__subclasses__() for kind in new]
        new = [kind for subclasses in below for kind in subclasses if kind not in kinds]
        kinds.update(new)
    return kinds


def outermost(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that are in no other one."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


# Values that stand for a tensor: other weights differ in nearly all of theirs.
SAMPLES_PER_TENSOR = 16
# Of two learning rates, relative: what rounding makes is less.
LEAST_DIFFERENCE = 1e-6
# Of the members of a round; whoever is further behind downloads a state.
MOST_EPOCHS_APART = 1

_SCHEDULE_ADVICE = (
    "A scheduler made around shoal.Optimizer counts the batches of one peer: give it as scheduler=, a function such as "
    "lambda opt: LambdaLR(opt, ...), and do not step it yourself. It then follows the epochs, which all peers share"
)
_TENSOR_ADVICE = {
    "trained": "give shoal.Optimizer model=, so that they are averaged, unless another optimizer takes care of them",
    "frozen": "load the same weights in all peers before training, or name these tensors in extra_tensors=",
    "buffers": "give shoal.Optimizer model=, so that they are averaged and newcomers get them",
}
_NAMES = {"trained": "parameters", "frozen": "frozen parameters", "buffers": "buffers"}


class PeerComparison:
    """Compares what this peer has with what others say that they have.

    Args:
        state_averager: has the optimizer.
        remainder: tensors of the model that are neither averaged nor given to newcomers.
        compares_rates: not with local updates, where every peer may go at its own pace.
    """

    def __init__(self, state_averager: TrainingStateAverager, remainder: Remainder, compares_rates: bool) -> None:
        self._state_averager, self._compares_rates = state_averager, compares_rates
        self._remainder = {name: getattr(remainder, name) for name in _NAMES}
        self._digests: dict[str, tuple[list[int], bytes]] = {}
        # What the others have been told last.
        self._described: dict[str, Any] = {}
        self._told: set[str] = set()
        self._rates_after_batch: tuple[int, list[float]] | None = None

    # --- with other peers ---------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What is to be the same, as plain values for the other members of a group."""
        rates = self._state_averager.learning_rates() if self._compares_rates else None
        description: dict[str, Any] = {name: self._digest(name, named) for name, named in self._remainder.items()}
        description["epoch"] = self._state_averager.local_epoch
        if rates is not None:
            description |= {"stepped_epoch": rates[0], "rates": rates[1]}
        self._described = description
        return description

    def epoch_of(self, description: object) -> int:
        """At which epoch a member was in a round, by its description; this peer's own if it talks nonsense."""
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
        """Warn of what another member of a group has otherwise."""
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
                "in epoch %d the learning rate is %s here and %s at peer %s: models will go apart. %s",
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
                "%s that the optimizer does not have differ between this peer and %s: %d, such as %s. Nothing brings "
                "them together: %s",
                _NAMES[name],
                peer,
                len(names),
                ", ".join(names[:3]),
                _TENSOR_ADVICE[name],
            )

    # --- from batch to batch ------------------------------------------------------------------------------------------

    def before_batch(self) -> None:
        """Notice that somebody has changed the learning rate although no epoch has begun."""
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
        """Between two epochs a user may move the learning rate, not between two batches of one."""
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
    """A hash of shapes and of some values."""
    description = hashlib.sha256(str([tuple(tensor.shape) for tensor in tensors]).encode())
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        samples = [_some_values(tensor.detach()) for tensor in tensors if tensor.device == device]
        description.update(torch.cat(samples).cpu().numpy().tobytes())
    return description.digest()


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return values[:: max(1, values.numel() // SAMPLES_PER_TENSOR)][:SAMPLES_PER_TENSOR].float()


def _check_modules(modules: Iterable[Any]) -> None:
    """The modules that the parameters belong to make dense gradients.

    Raises:
        ValueError: one of them does not.
    """
    for module in modules:
        if isinstance(module, _SPARSE_MODULES) and module.sparse:
            raise ValueError(
                f"{module} makes sparse gradients, and averages of several peers are dense: make it with sparse=False"
            )
