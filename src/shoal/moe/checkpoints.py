"""Experts on the disk: ``<folder>/<uid>/checkpoint_<date>_<time>.pt``, and ``checkpoint_last.pt``, which is the newest.

Files are written under another name and renamed when complete. The oldest are deleted.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from shoal.errors import ReactorError
from shoal.moe.backend import ModuleBackend

logger = logging.getLogger(__name__)

LAST = "checkpoint_last.pt"
# How many are kept of each expert. Chosen.
KEPT = 10

RunSafely = Callable[[Callable[[], Any]], Any]
"""Runs a function while no expert is being trained, and returns its result."""


def is_directory(directory: str | os.PathLike[str] | None) -> bool:
    """Check that there is such a folder.

    Raises:
        AssertionError: there is not.
    """
    assert directory is not None, "checkpoint_dir must be a folder, got None"
    assert Path(directory).is_dir(), f"checkpoint_dir must be an existing folder, got {str(directory)!r}"
    return True


def store_experts(experts: Mapping[str, ModuleBackend], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write a checkpoint of each expert."""
    _write(_states_of(experts), Path(checkpoint_dir))


def _states_of(experts: Mapping[str, ModuleBackend]) -> dict[str, Any]:
    return {uid: _copied(expert.state_dict()) for uid, expert in experts.items()}


def _copied(value: Any) -> Any:
    """A copy with tensors on the CPU, so that any machine can load it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copied(each) for each in value])
    return copy.deepcopy(value)


def _write(states: Mapping[str, Any], checkpoint_dir: Path) -> None:
    is_directory(checkpoint_dir)
    # Dashes, because names of files have no colons on some systems.
    name = f"checkpoint_{datetime.now().strftime('%Y-%m-%d_%H-%M-%S.%f')}.pt"
    for uid, state in states.items():
        folder = checkpoint_dir / uid
        folder.mkdir(exist_ok=True)
        written = folder / f"{name}.new"
        torch.save(state, written)
        written.replace(folder / name)
        with contextlib.suppress(FileNotFoundError):
            written.unlink()
        try:
            os.link(folder / name, written)
        except OSError:  # not every file system has links
            shutil.copyfile(folder / name, written)
        written.replace(folder / LAST)
        for old in sorted(folder.glob("checkpoint_[0-9]*.pt"))[:-KEPT]:
            old.unlink()


def load_experts(experts: Mapping[str, ModuleBackend], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Load the newest checkpoint of each expert. An expert without one keeps its values, with a warning.

    Raises:
        RuntimeError: a checkpoint cannot be read, or is of another expert.
    """
    is_directory(checkpoint_dir)
    for uid, expert in experts.items():
        path = Path(checkpoint_dir) / uid / LAST
        if path.exists():
            try:
                expert.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            except Exception as e:
                raise RuntimeError(
                    f"expert {uid} cannot load {path}; put an older checkpoint of this folder in its place, or move it "
                    f"away to start from scratch ({type(e).__name__}: {e})"
                ) from e
        else:
            logger.warning("there is no checkpoint of expert %s in %s: it starts from scratch", uid, checkpoint_dir)


class CheckpointSaver(threading.Thread):
    """Writes checkpoints in its constructor, at regular intervals once it is started, and at shutdown.

    Args:
        module_backends: the experts by uid.
        checkpoint_dir: an existing folder.
        update_period: the interval in seconds.
        run_safely: keeps a state from being read while it changes.
    """

    def __init__(
        self,
        module_backends: Mapping[str, ModuleBackend],
        checkpoint_dir: str | os.PathLike[str],
        update_period: float,
        *,
        run_safely: RunSafely | None = None,
    ) -> None:
        super().__init__(name="shoal-checkpoints", daemon=True)
        is_directory(checkpoint_dir)
        self.module_backends, self.checkpoint_dir = module_backends, Path(checkpoint_dir)
        self.update_period = update_period
        self._run_safely: RunSafely = run_safely or (lambda function: function())
        self._ending, self._lock = threading.Event(), threading.Lock()
        store_experts(module_backends, checkpoint_dir)

    def save(self) -> None:
        """Write checkpoints now."""
        # The copies are written while training continues.
        states = self._run_safely(lambda: _states_of(self.module_backends))
        with self._lock:
            _write(states, self.checkpoint_dir)

    def run(self) -> None:
        while not self._ending.wait(self.update_period):
            try:
                self.save()
            except ReactorError:  # the server is ending: the last checkpoints are yet to come
                return
            except Exception as e:
                logger.warning("could not write checkpoints to %s: %s", self.checkpoint_dir, e)

    def shutdown(self) -> None:
        """Write the final checkpoints and stop. Call it after training has stopped. Idempotent."""
        if not self._ending.is_set():
            self._ending.set()
            if self.is_alive():
                self.join()
            store_experts(self.module_backends, self.checkpoint_dir)
