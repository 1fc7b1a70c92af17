"""The classes of experts by name: built-in ones, and those that users register; their optimizers and schedules."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

SampleInput = Callable[[int, int], "torch.Tensor | tuple[torch.Tensor, ...]"]
M = TypeVar("M", bound=Callable[..., nn.Module])

name_to_block: dict[str, Callable[..., nn.Module]] = {}
"""The classes of experts, which take the width."""
name_to_input: dict[str, SampleInput] = {}
"""Functions that make inputs for them, of a number of rows and a width."""


def register_expert_class(name: str, sample_input: SampleInput) -> Callable[[M], M]:
    """Class decorator: servers can run experts of this class by its name.

    Args:
        name: for ``expert_cls``.
        sample_input: ``sample_input(batch_size, hidden_dim)`` returns an input or a tuple of them.

    Raises:
        RuntimeError: the name is taken.
    """

    def register(expert_class: M) -> M:
        if name in name_to_block:
            raise RuntimeError(f"the class of experts {name!r} is registered already: choose another name")
        name_to_block[name], name_to_input[name] = expert_class, sample_input
        return expert_class

    return register


def add_custom_models_from_file(path: str | os.PathLike[str]) -> None:
    """Run a file that registers classes of experts.

    Raises:
        FileNotFoundError: there is no such file.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"custom_module_path must be the path of a Python file, got {str(path)!r}")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _row(rows: int, width: int) -> torch.Tensor:
    return torch.empty(rows, width, device="cpu")


def _sequence(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return torch.empty(rows, 128, width, device="cpu"), torch.zeros(rows, 128, dtype=torch.bool, device="cpu")


def _masked(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return _row(rows, width), torch.ones(rows, width, dtype=torch.long, device="cpu")


# --- built-in classes -------------------------------------------------------------------------------------------------


@register_expert_class("ffn", _row)
class FeedforwardExpert(nn.Module):
    """Two layers beside a residual connection, with a layer norm at the end."""

    def __init__(self, hid_dim: int) -> None:
        super().__init__()
        self.ffn = nn.Linear(hid_dim, 4 * hid_dim)
        self.ffn_output = nn.Linear(4 * hid_dim, hid_dim)
        self.layer_norm = nn.LayerNorm(hid_dim, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.ffn(x), approximate="tanh")
        normalised: torch.Tensor = self.layer_norm(x + self.ffn_output(hidden))
        return normalised


@register_expert_class("transformer", _sequence)
class TransformerExpert(nn.TransformerEncoderLayer):
    """One layer of an encoder with 16 heads; true values of the mask are padding."""

    def __init__(self, hid_dim: int) -> None:
        super().__init__(hid_dim, nhead=16, dim_feedforward=4 * hid_dim, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, src_key_padding_mask=padding_mask)


@register_expert_class("nop", _row)
class NopExpert(nn.Module):
    """Returns a copy of its input."""

    def __init__(self, hid_dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(0, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


@register_expert_class("nop_delay", _row)
class DelayedNopExpert(NopExpert):
    """The same, half a second later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return super().forward(x)


@register_expert_class("det_dropout", _masked)
class DeterministicDropoutExpert(nn.Module):
    """Two layers after a dropout whose mask is an input: zeros are dropped."""

    KEPT = 0.8

    def __init__(self, hid_dim: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(hid_dim, 2 * hid_dim)
        self.linear_out = nn.Linear(2 * hid_dim, hid_dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = x.where(mask != 0, 0) / self.KEPT
        result: torch.Tensor = self.linear_out(nn.functional.relu(self.linear_in(kept)))
        return result


# --- optimizers and schedules -----------------------------------------------------------------------------------------


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer that passes everything on to another one.

    Args:
        optim: the other one.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:  # the base class would make groups of its own
        self.optim = optim

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim}

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optim.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)


class ClippingWrapper(OptimizerWrapper):
    """Limits the norm of all gradients together before each step.

    Args:
        clip_grad_norm: the largest norm.

    Raises:
        ValueError: the norm is not positive.
    """

    def __init__(self, optim: torch.optim.Optimizer, clip_grad_norm: float) -> None:
        if not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be a positive number, got {clip_grad_norm}")
        super().__init__(optim)
        self.clip_grad_norm = clip_grad_norm

    def step(self, *args: Any, **kwargs: Any) -> Any:
        parameters = [each for group in self.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        return super().step(*args, **kwargs)


def get_linear_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """A rate that rises from 0 during the warm-up, and then falls to 0 at the end of the training."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


schedule_name_to_scheduler: dict[str, Callable[..., Any] | None] = {
    "linear": get_linear_schedule_with_warmup,
    "none": None,
}
