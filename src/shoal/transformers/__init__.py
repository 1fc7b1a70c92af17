"""For users of Hugging Face: a ``Trainer`` that makes its steps together with peers over the internet, and adapters of
peft.

The ``Trainer`` makes a local step after each batch, which only adds gradients; a swarm step follows when all peers
together have enough samples. The package uses only methods that ``Trainer`` documents for subclasses.

In reading order:

- :mod:`~.trainer` is the trainer: it joins the run when ``train`` begins, counts samples, and leaves it at the end.
- :mod:`~.options` refuses arguments that cannot work with peers when the trainer is made.
- :mod:`~.fingerprint` names the frozen model beneath adapters. It works without ``transformers``. So does your own
  training loop, with or without ``accelerate``, which needs only :class:`shoal.Optimizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.transformers.fingerprint import fingerprint

if TYPE_CHECKING:
    from shoal.transformers.trainer import SwarmTrainer

__all__ = ["SwarmTrainer", "fingerprint"]


def __getattr__(name: str) -> Any:
    if name != "SwarmTrainer":
        raise AttributeError(f"module 'shoal.transformers' has no attribute {name!r}")
    try:
        from shoal.transformers.trainer import SwarmTrainer
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "shoal":
            raise
        raise ModuleNotFoundError(
            f"SwarmTrainer needs the packages transformers and accelerate ({e}): pip install 'shoal[transformers]'",
            name=e.name,
        ) from e
    return SwarmTrainer
