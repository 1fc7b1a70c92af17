"""The stable interface of shoal itself: what it offers at the top, and what it adds to the inherited names.

A change here is a change for every user; ``test_inherited_api.py`` has the names that come from elsewhere.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import shoal
from tests.interface import check_signature, find

pytestmark = pytest.mark.oldest

ROOMS = ("archive", "averaging", "compression", "dht", "lightning", "optim", "p2p", "testing", "utils")

ADDED = {
    "shoal.Optimizer": """
        *, dht, run_id, target_batch_size, optimizer, model=None, check_state=None, aggregation=None,
        state_aggregation=None, peer_momentum=0.0, guard='members'
    """,
    "shoal.DecentralizedAverager": """
        averaged_tensors, dht, *, start, prefix, quorum=None, quorum_grace=3.0, tags=None, aggregation=None
    """,
    "shoal.DecentralizedAverager.step": "self, *, expected_group_size=None, tag=''",
    "shoal.DecentralizedAverager.average_in_group": "self, session, tensors, infos",
    "shoal.MultiProcessOptimizer": """
        *, dht, optimizer, params=None, scheduler=None, batch_size_per_step=None, reuse_grad_buffers=False,
        extra_tensors=(), process_group=None, **options
    """,
    "shoal.testing.run": "main, *, seed=0",
}
"""Options and methods that the inherited interface does not have; the table names no others."""

ERRORS = {
    "shoal.errors.ArchiveError": "shoal.errors.ShoalError",
    "shoal.errors.BootstrapError": "shoal.p2p.P2PDaemonError RuntimeError",
    "shoal.errors.DialError": "shoal.p2p.P2PDaemonError ConnectionError",
    "shoal.errors.IdentityTakenError": "shoal.p2p.P2PDaemonError",
    "shoal.errors.ReactorError": "shoal.errors.ShoalError RuntimeError",
    "shoal.errors.ProcessGroupError": "shoal.errors.ShoalError",
    "shoal.errors.SimulationError": "shoal.errors.ShoalError",
}
"""What one may catch each error as."""


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_whatever_is_offered_is_there(room: str) -> None:
    module = importlib.import_module(f"shoal.{room}".rstrip("."))
    names = getattr(module, "__all__", [])
    assert len(set(names)) == len(names)
    assert not [name for name in names if not hasattr(module, name)]


def test_editors_and_type_checkers_see_what_is_offered() -> None:
    """Names are loaded at first use, so they are imported once more where only type checkers look."""
    assert shoal.__file__ is not None
    tree = ast.parse(Path(shoal.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name for node in imports for alias in node.names}
    assert set(shoal.__all__) <= seen | {"__version__"} | set(ROOMS)


@pytest.mark.parametrize("path", ADDED)
def test_additions(path: str) -> None:
    check_signature(path, ADDED[path])


@pytest.mark.parametrize("path", ERRORS)
def test_errors_can_be_caught_as(path: str) -> None:
    for base in ERRORS[path].split():
        assert issubclass(find(path), find(base)), f"{path} is no {base}"


def test_every_error_is_in_the_tree_that_its_module_draws() -> None:
    errors = importlib.import_module("shoal.errors")
    own = [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == "shoal.errors"
    ]
    assert own
    assert not [name for name in own if name not in str(errors.__doc__)]
