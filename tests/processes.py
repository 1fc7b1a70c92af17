"""Runs one function of a module in several processes that form a group of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests import nursery
from tests.nursery import Process

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 270
"""Most of it is importing torch on a machine that does other things, too."""


def run_in_group(function: Callable[[], None], size: int, ends: Mapping[int, int] | None = None) -> None:
    """Run the function in so many processes with gloo; its assertions are those of the caller.

    Args:
        ends: exit statuses by rank, other than 0.

    Raises:
        AssertionError: it raised in one of them; with what that process has printed.
    """
    if sys.platform == "win32":
        pytest.skip("this system cannot fork")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        environment = os.environ | {
            "WORLD_SIZE": str(size),
            "MEETING": (Path(folder) / "meeting").as_uri(),
            "OUTPUTS": folder,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "",
        }
        arguments = [function.__module__, function.__qualname__, str(size)]
        process = nursery.start(Path(__file__), arguments, stderr=errors.fileno(), environment=environment, cwd=ROOT)
        try:
            process.wait(LIMIT_SECONDS)
        finally:
            _kill_with_children(process)
            assert process.stdin
            process.stdin.close()
        assert process.stdout
        with process.stdout:
            found = process.stdout.read()
        errors.seek(0)
        outputs = [found + errors.read()]
        for rank in range(size):
            printed = Path(folder) / f"{rank}.txt"
            outputs.append(printed.read_text(errors="replace") if printed.exists() else "never started")
        assert process.returncode == 0, "\n".join(outputs)
    for rank, end in enumerate(json.loads(found)):
        assert end == (ends or {}).get(rank, 0), f"rank {rank} failed with {end}:\n{outputs[rank + 1]}"


def _kill_with_children(process: Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def main(module: str, name: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=size)
    getattr(importlib.import_module(module), name)()
    dist.barrier()
    dist.destroy_process_group()


def start_all(module: str, name: str, size: int) -> list[int]:
    """Run the function in processes that inherit what is imported here, and return how each of them has ended.

    To import torch takes seconds of pure computing; once is enough. No thread runs yet, so a fork is safe.
    """
    importlib.import_module(module)
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _write_to(Path(os.environ["OUTPUTS"]) / f"{rank}.txt")
            os.environ["RANK"] = str(rank)
            main(module, name, rank, size)
            sys.exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _write_to(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(json.dumps(start_all(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
