"""What breaks on a graphics card can be seen in the source: these rules hold for all of ``src/shoal``.

- A tensor that torch makes without ``device=`` is wherever ``torch.set_default_device`` says, also when it is meant to
  be in the host's memory, or beside another tensor.
- What ``non_blocking=True`` copies is not there yet. Whoever uses it must wait: the same function records an event, or
  makes a stream wait.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "shoal"
MADE_WITHOUT = ("cli/demo/",)
"""A program of its own, which trains on the CPU and sets no default device."""

CONSTRUCTORS = frozenset(
    [
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_permuted",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "sparse_coo_tensor",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    ]
)
"""Functions of torch that heed the default device; not those that take it from a tensor or from memory."""
WAITING = frozenset(["Event", "record", "record_event", "synchronize", "wait", "wait_event", "wait_stream"])
"""Calls of these names show that a function takes care of what it has copied without waiting."""


def findings(source: str) -> Iterator[str]:
    """Lines of a module that break one of the rules."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    cared_for = {id(node) for function in functions if _waits(function) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if _is_constructor(node.func) and "device" not in keywords:
            yield f"line {node.lineno}: {ast.unparse(node.func)} without device="
        non_blocking = keywords.get("non_blocking")
        is_off = non_blocking is None or (isinstance(non_blocking, ast.Constant) and not non_blocking.value)
        if not is_off and id(node) not in cared_for:
            yield f"line {node.lineno}: non_blocking in a function that waits for nothing"


def _is_constructor(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in CONSTRUCTORS
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
    )


def _waits(function: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr in WAITING for called in calls)


def test_tensors_are_made_where_they_are_meant_to_be_and_copies_are_waited_for():
    found = [
        f"{path.relative_to(SOURCE).as_posix()}, {finding}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.relative_to(SOURCE).as_posix().startswith(MADE_WITHOUT)
        for finding in findings(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.zeros(3)", 1),
        ("torch.zeros(3, device='cpu')", 0),
        ("torch.zeros_like(x)", 0),
        ("numpy.zeros(3)", 0),
        ("def f(x):\n    return x.to('cpu', non_blocking=True)", 1),
        ("def f(x):\n    return x.to('cpu', non_blocking=False)", 0),
        ("def f(x, late):\n    return x.to('cpu', non_blocking=late)", 1),
        ("def f(x):\n    y = x.to('cpu', non_blocking=True)\n    torch.Event(x.device).record()\n    return y", 0),
    ],
)
def test_the_rules_find_what_they_are_about(source, count):
    assert len(list(findings(source))) == count
