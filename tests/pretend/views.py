"""Views of modules: what an import statement in shoal or its tests gets instead of a module of the standard library."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

IMPORTERS = ("shoal", "tests")
"""Who gets views."""
NOT_FOR = "tests.pretend"
"""What makes the views needs the real thing."""

_views: dict[str, ModuleType | None] = {}
"""By name of the module; None: there is no such module."""
_real_import = builtins.__import__


class View(ModuleType):
    """A module without some of its names and with others in their place. What is set on it is set on the module.

    Args:
        module: what is looked at.
        hidden: names that the other system lacks.
        instead: names that it has, or that mean something else there.
    """

    def __init__(self, module: ModuleType, hidden: Collection[str] = (), instead: Mapping[str, Any] | None = None):
        super().__init__(module.__name__)
        own = ModuleType.__getattribute__(self, "__dict__")
        own.update(_module=module, _hidden=frozenset(hidden), _instead=dict(instead or {}))

    def __getattribute__(self, name: str) -> Any:
        own = ModuleType.__getattribute__(self, "__dict__")
        if name in ("__class__", "_module", "_hidden", "_instead"):
            return ModuleType.__getattribute__(self, name)
        if name == "__dict__":  # pytest's monkeypatch looks into it for what it has to put back
            there = {name: value for name, value in vars(own["_module"]).items() if name not in own["_hidden"]}
            return there | own["_instead"]
        if name in own["_instead"]:
            return own["_instead"][name]
        if name in own["_hidden"]:
            raise AttributeError(f"module {own['_module'].__name__!r} has no attribute {name!r} on this system")
        return getattr(own["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._instead:
            self._instead[name] = value
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._instead:
            del self._instead[name]
        else:
            delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._module), *self._instead} - self._hidden)


def show(name: str, view: ModuleType | None) -> None:
    """Let import statements of shoal and its tests find this view; None: they find no such module."""
    _views[name] = view


def look_at(module: ModuleType, hidden: Collection[str] = (), instead: Mapping[str, Any] | None = None) -> None:
    """Show a view of a module, see :class:`View`."""
    show(module.__name__, View(module, hidden, instead))


def _sees_views(importer: str) -> bool:
    return importer.split(".")[0] in IMPORTERS and not importer.startswith(NOT_FOR)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Any = (),
    level: int = 0,
) -> ModuleType:
    top = name.partition(".")[0]
    shown = name if fromlist else top  # `import os.path` gives os
    if level or shown not in _views or not _sees_views(str((globals or {}).get("__name__", ""))):
        return _real_import(name, globals, locals, fromlist, level)
    view = _views[shown]
    if view is None:
        raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)
    if isinstance(view, View):
        _real_import(name, globals, locals, fromlist, level)  # it may be a submodule
    return view


def _import_module(name: str, package: str | None = None) -> ModuleType:
    if name in _views and _sees_views(sys._getframe(1).f_globals.get("__name__", "")):
        return _import(name, {"__name__": IMPORTERS[0]}, fromlist=("*",))
    return importlib.import_module(name, package)


def hand_out() -> None:
    """From now on import statements find what is shown, and so does ``importlib.import_module``."""
    look_at(importlib, (), {"import_module": _import_module})
    builtins.__import__ = _import
