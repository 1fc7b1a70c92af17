"""How outer parameters come back into the model, which has been trained on since they were sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shoal.optim.diloco.fragments import Fragment

REBASE = "rebase"


@dataclass(frozen=True)
class MergePolicy:
    """The rule.

    Raises:
        ValueError: there is no such rule.
    """

    alpha: float | str
    """The weight of the local values: 0 replaces them, 1 leaves the model alone. ``"rebase"``: the model moves by what
    the exchange has changed, and keeps the progress that it has made meanwhile."""

    def __post_init__(self) -> None:
        if self.alpha == REBASE:
            return
        is_number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        if not is_number or not 0 <= self.alpha <= 1:  # type: ignore[operator]
            raise ValueError(f'fragment_update_alpha must be a number from 0 to 1, or "{REBASE}": got {self.alpha!r}')

    @classmethod
    def choose(cls, alpha: float | str | None, delay: int | None) -> MergePolicy:
        """The user's rule, or by default the one that suits.

        Args:
            alpha: the rule; ``None``: the default.
            delay: the inner steps between sending and applying; ``None``: as many as the exchange takes.
        """
        if alpha is None:
            alpha = 0.0 if delay == 0 else REBASE
        return cls(alpha)

    @property
    def is_rebase(self) -> bool:
        """Whether local progress since sending is kept as it is."""
        return self.alpha == REBASE

    @torch.no_grad()
    def apply(self, fragment: Fragment, outer: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Bring new outer parameters into the model.

        Args:
            outer: the outer parameters.
            sent: the parameters of the model when they were sent; ``None``: they are the same now. Only ``"rebase"``
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
