"""The model that the parameters belong to, and what is in it that no optimizer moves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from shoal.optim.trainable import check_modules

logger = logging.getLogger(__name__)

Named = list[tuple[str, torch.Tensor]]


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
        check_modules(owners)
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
