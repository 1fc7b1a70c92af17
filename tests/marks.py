"""Marks of whole folders, and groups of tests that run one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest


def mark_folders(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``pytestmark`` in a folder's conftest.py marks its tests, unless they have a mark of that name already."""
    folders = {
        Path(plugin.__file__).parent: plugin.pytestmark
        for plugin in config.pluginmanager.get_plugins()
        if hasattr(plugin, "pytestmark")
    }
    for item in items:
        for folder in filter(folders.get, item.path.parents):
            marks = folders[folder] if isinstance(folders[folder], list) else [folders[folder]]
            for mark in marks:
                if item.get_closest_marker(mark.name) is None:
                    item.add_marker(mark)


def keep_groups(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add ``@`` and its ``xdist_group`` to a test's name, by which ``--dist loadgroup`` finds it.

    pytest-xdist up to 3.8 does this itself, but in a field that pytest 9.2 no longer reads: it ignores all groups.
    """
    if not getattr(config.option, "loadgroup", False):  # only workers have this option
        return
    for item in items:
        groups = sorted({mark.args[0] for mark in item.iter_markers("xdist_group")})
        suffix = "@" + "_".join(groups)
        if groups and not item.nodeid.endswith(suffix):
            item._id = type(item.id).parse(item.nodeid + suffix)
