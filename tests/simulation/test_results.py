"""Whatever breaks in a round: a result says whose values are in the averages, and nothing is counted twice or lost."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.drills import mostly_drills
from tests.simulation.breaking import AUX, NODE, Broken
from tests.simulation.cutting import KINDS, check, own_values


@pytest.mark.parametrize("with_deaths", mostly_drills([True, False]), ids=["some die", "nobody dies"])
@pytest.mark.parametrize("seeds", mostly_drills([2, 6]))
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_what_they_say(kind: str, seeds: int, with_deaths: bool) -> None:
    """``python -m tests.simulation.cutting`` tries more seeds."""
    ways: Counter[str] = Counter()
    for seed in range(seeds):
        ways += check(kind, seed, with_deaths=with_deaths)
    assert ways["content"] + ways["with losses"] > 0


def test_a_lost_reducer_has_told_whom_it_left_out() -> None:
    """The reducer does not get to tell the coordinator whom it has left out, but has told it with its averages."""
    check("many calls", 14)


@pytest.mark.parametrize("seed", [103, 105])
def test_mixed_values_never_become_the_coordinators(seed: int) -> None:
    """In these rounds a member comes back that the coordinator has lost, when its parts were averaged again."""
    check("half of the way", seed)


def test_late_members_get_no_changed_values() -> None:
    """A member has its result before the round has ended for all, and then leads one that the coordinator has lost."""
    check("quorum", 529)


def test_a_result_shows_the_slow_member() -> None:
    def slow_down(broken: Broken) -> None:
        broken.host_of(2).uplink /= 8

    broken = Broken(slow_down)
    for node, result in zip(broken.nodes, broken.results, strict=True):
        seconds = {broken.group.index(peer): each.seconds for peer, each in result.traffic.items()}
        if node.p2p.peer_id != broken.group[2]:
            assert max(seconds, key=lambda position: seconds[position]) == 2


@pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))
def test_an_auxiliary_keeps_no_result(seed: int) -> None:
    """Its own tensors are none. It ends as the others do."""

    def slow_down(broken: Broken) -> None:
        broken.host_of(3).uplink = 1000.0

    modes = (AUX, NODE, NODE, NODE)
    tensors = [own_values(index) for index in range(len(modes))]
    broken = Broken(slow_down, seed=seed, tensors=tensors, modes=modes, quorum=2, quorum_grace=0.5)
    position = broken.group.index(broken.nodes[0].p2p.peer_id)
    for tensor, result in zip(tensors[1:], broken.results[1:], strict=True):
        if result.share_averaged == 1:
            assert torch.equal(tensor, tensors[2] if broken.results[1].late else tensors[1])
        else:
            assert (result.late, result.share_averaged, position) == (True, 0, 0)
    assert torch.equal(tensors[0], own_values(0))
