"""Runs one function of a module in several processes that form a group of ``torch.distributed``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

LIMIT_SECONDS = 150
"""Most of it is importing torch on a machine that does other things, too."""


def run_in_group(function: Callable[[], None], size: int, ends: Mapping[int, int] | None = None) -> None:
    """Run the function in so many processes with gloo; its assertions are those of the caller.

    Args:
        ends: exit statuses by rank, other than 0.

    Raises:
        AssertionError: it raised in one of them; with what that process has printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            command = [sys.executable, "-m", __spec__.name, function.__module__, function.__qualname__]
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MEETING": (Path(folder) / "meeting").as_uri(),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "",
            }
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=_root()
                )
            )
        try:
            outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == (ends or {}).get(rank, 0), f"rank {rank} failed:\n{output}"


def _root() -> Path:
    return Path(__file__).parents[1]


def main(module: str, name: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=size)
    getattr(importlib.import_module(module), name)()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
