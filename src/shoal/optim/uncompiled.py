"""Keeps ``torch.compile`` out of methods that speak to other processes and peers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(method: Callable[P, T]) -> Callable[P, T]:
    """Let a compiled function that calls this method run it, and all that it calls, as plain Python.

    Otherwise the compiler would go through locks, sockets and threads, and fail there. What the method calls may be
    compiled itself, such as the step of an inner optimizer.
    """
    plain: Callable[P, T] | None = None

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal plain
        if plain is None:
            # Not when the class is made: it loads the compiler, which takes a second. All optimizers of torch load it.
            plain = torch.compiler.disable(method)
        return plain(*args, **kwargs)

    return call
