"""The two code paths that torch has on ordinary processors: with and without wide vectors."""

from __future__ import annotations

import os
import subprocess
import sys


def check_same_on_both(module: str) -> None:
    """Let two processes call the function ``digest`` of a module of tests, one on each path: both find the same."""
    script = f"""
import torch
from {module} import digest
print(torch.backends.cpu.get_cpu_capability())
print(digest())
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "ATEN_CPU_CAPABILITY": path, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in ("default", "avx2")
    ]
    answers = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (plain_path, plain), (_, fast) = answers
    assert plain_path in {"DEFAULT", "NO AVX"}, "the name depends on the version of torch"
    assert plain == fast
