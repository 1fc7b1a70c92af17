"""What tests of the interface have in common: finding a name, and comparing a signature with a table."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from operator import attrgetter
from typing import Any

from shoal.compression import NoCompression
from shoal.optim.grad_averager import GradientAverager


def find(path: str) -> Any:
    """The object at a dotted path: the longest prefix that is a module, then attributes."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as e:
            if not path.startswith(f"{e.name}"):
                raise
            continue
        return attrgetter(".".join(parts[split:]))(module) if split < len(parts) else module
    return getattr(sys.modules.get("builtins"), path)


def expected_signature(parameters: str) -> inspect.Signature:
    modules = {name: importlib.import_module(name) for name in ("shoal", "torch")}
    scope: dict[str, Any] = {"NoCompression": NoCompression, "GradientAverager": GradientAverager, **modules}
    exec(f"def function({' '.join(parameters.split())}): pass", scope)
    return inspect.signature(scope["function"])


def same_default(actual: Any, expected: Any) -> bool:
    if isinstance(expected, NoCompression):
        return actual is None or type(actual) is NoCompression
    if isinstance(expected, functools.partial):
        return isinstance(actual, functools.partial) and _of_partial(actual) == _of_partial(expected)
    return bool(actual == expected and (actual is None) == (expected is None))


def _of_partial(made: functools.partial[Any]) -> tuple[Any, ...]:
    return made.func, made.args, made.keywords


def check_signature(path: str, parameters: str) -> None:
    """A function takes what the table says, in the same way and with the same defaults; more only if it is optional."""
    actual = list(inspect.signature(find(path)).parameters.values())
    expected = list(expected_signature(parameters).parameters.values())
    by_name = {parameter.name: parameter for parameter in actual}
    takes_any = {parameter.kind for parameter in actual}
    for parameter in expected:
        if parameter.kind is parameter.VAR_KEYWORD:
            assert parameter.kind in takes_any, f"{path} must take further keywords"
            continue
        assert parameter.name in by_name, f"{path} lacks {parameter.name}"
        found = by_name.pop(parameter.name)
        assert found.kind in (found.POSITIONAL_OR_KEYWORD, parameter.kind), f"{path}: {parameter.name} is {found.kind}"
        required = found.default is found.empty
        assert required == (parameter.default is parameter.empty), f"{path}: is {parameter.name} required?"
        assert required or same_default(found.default, parameter.default), (
            f"{path}: {parameter.name} has default {found.default!r} instead of {parameter.default!r}"
        )

    positional = [p.name for p in actual if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [p.name for p in expected if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(wanted)] == wanted, f"{path}: another order of positional parameters"
    added = [p for p in by_name.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert all(p.default is not p.empty for p in added), f"{path}: old calls lack the new {added}"
