"""Tests as on another system: ``pytest --pretend=windows`` or ``--pretend=macos``, on Linux.

What shoal and its tests import are views of the standard library, in which names that the other system lacks are
missing and others behave as they do there; the standard library itself and all other packages see what they always see.
So a view says ``os.name == "nt"`` to shoal while ``subprocess`` goes on with fork.

:mod:`tests.pretend.views`    the views, and the import statement that hands them out
:mod:`tests.pretend.windows`  Windows: names, text files, clocks, locks of files
:mod:`tests.pretend.proactor` its event loop, over a selector
:mod:`tests.pretend.macos`    macOS: names, ``setsockopt`` after a reset, ``poll``, ports that overlap

It is switched on by the environment variable ``SHOAL_PRETEND``, so that processes which tests start pretend as well:
``startup/sitecustomize.py`` is what they load first.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

SYSTEMS = ("windows", "macos")
VARIABLE = "SHOAL_PRETEND"
STARTUP = str(Path(__file__).parent / "startup")

system = ""
"""Which system this process pretends to be; empty: it is what it is."""


def asked_for() -> str:
    """The system that the command line or the environment asks for; processes of xdist have the environment alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pretend", default=os.environ.get(VARIABLE, ""))
    return str(parser.parse_known_args()[0].pretend)


def begin(wanted: str) -> None:
    """Pretend from now on, for all modules that are not imported yet; nothing happens if no system is wanted.

    Raises:
        ValueError: there is no such system.
        RuntimeError: too late, shoal has seen this one.
    """
    global system
    if not wanted or wanted == system:
        return
    if wanted not in SYSTEMS:
        raise ValueError(f"--pretend must be one of {', '.join(SYSTEMS)}, got {wanted!r}")
    if system or "shoal" in sys.modules:
        raise RuntimeError(f"cannot pretend to be {wanted}: shoal has been imported already, or something else is on")
    system = os.environ[VARIABLE] = wanted
    paths = [STARTUP, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    importlib.import_module(f"tests.pretend.{wanted}").begin()
