"""A small swarm in virtual time meets one attack after another, and loses neither time nor quality by it.

What concerns newcomers or clocks most is in ``test_newcomers.py`` and ``test_clock.py``.
``benchmarks/hostile.py`` tries more of them, and more seeds.
"""

from __future__ import annotations

import pytest

from shoal.averaging.round.parts import MIN_EVEN_BYTES
from tests.drills import mostly_drills
from tests.hostile.attacks import OF_MACHINES, STRANGERS
from tests.hostile.simulated import HONEST, Outcome, train

# In one process, so that the same swarm in peace is made once.
pytestmark = [pytest.mark.xdist_group("hostile swarms"), pytest.mark.timeout(120)]
PEERS, EPOCHS = 6, 6
JOINING = {"ghosts_take_part", "joins_with_absurd_wishes"}
"""Strangers who join: for them others wait a twentieth of their time."""
ELSEWHERE = OF_MACHINES | {
    "fills_the_table",
    "crowds_the_keys_of_a_run",
    "hides_what_is_stored",
    "withdraws_what_others_declared",
    "asks_for_a_chunk_now_and_then",
    "tells_another_time",
}
LIKE_OTHERS = {
    "ghosts_take_part",
    "calls_the_end_of_an_epoch_far_away",
    "claims_a_billion_samples",
    "joins_with_absurd_wishes",
    "invites_and_falls_silent",
}
"""The rules that find a million epochs find the claims, and those that find ghosts the wishes and invitations.

Ghosts are tried with every change on a peer that trains alone.
"""
NAMED = {"claims_a_million_epochs"}
"""What would be as bad if a member did it."""
FAULTS = {"withholds_averages", "sends_what_is_not_finite"}
"""Members that are named. A claim is only cut, and a peer that does not come may have long batches."""
VALUES = (PEERS + 1) * MIN_EVEN_BYTES // 4
"""Of a model of which each member reduces a part, so that it has averages to withhold."""
LINES = 20 * PEERS
"""Of all of them together in a minute, which is what the epochs take."""


def check_equal(outcome: Outcome, peace: Outcome, *, goodput: float) -> None:
    """The swarm has made as many epochs, nearly as fast, with the same parameters everywhere."""
    assert outcome.epochs == peace.epochs >= EPOCHS
    assert outcome.goodput >= goodput * peace.goodput
    assert outcome.loss == pytest.approx(peace.loss, rel=0.01)
    assert outcome.spread == 0.0
    assert outcome.alone == 0
    assert outcome.downloads == 0, "nobody was behind"


@pytest.mark.slow_drill
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_where_nobody_attacks_all_stay_together(seed: int) -> None:
    """From whatever round on they came, and however short their first one was."""
    outcome = train(seed, peers=20, epochs=10)
    assert outcome.goodput > 0.93
    assert outcome.alone == outcome.downloads == outcome.lines == 0
    assert outcome.spread < 0.01, "not all were in the first rounds, and these trainers average no parameters"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow_drill] if name in LIKE_OTHERS else [])
        for name in STRANGERS
        if name not in ELSEWHERE
    ],
)
def test_a_stranger_changes_nothing(name: str) -> None:
    peace, attacked = train(1, peers=PEERS, epochs=EPOCHS), train(1, (name,), peers=PEERS, epochs=EPOCHS)
    check_equal(attacked, peace, goodput=0.9 if name in JOINING else 0.95)
    assert attacked.lines <= LINES
    assert attacked.named >= {name} & NAMED


@pytest.mark.slow_drill
def test_three_strangers_at_once_change_nothing() -> None:
    names = ("claims_a_million_epochs", "asks_for_a_chunk_now_and_then", "withdraws_what_others_declared")
    peace, attacked = train(3, peers=PEERS, epochs=EPOCHS), train(3, names, peers=PEERS, epochs=EPOCHS)
    check_equal(attacked, peace, goodput=0.95)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("claims_all_the_weight", 3),
        pytest.param("withholds_averages", 1, marks=pytest.mark.slow_drill),
        pytest.param("withholds_averages", 3, marks=pytest.mark.slow_drill),
        pytest.param("sends_what_is_not_finite", 1, marks=pytest.mark.slow_drill),
        pytest.param("says_that_it_comes_and_never_does", 1, marks=pytest.mark.slow_drill),
    ],
)
def test_a_liar_costs_a_bounded_share(name: str, seed: int) -> None:
    """Its samples count as long as it brings them; what the others lose is bounded, and their model is one."""
    outcome, peace = (train(seed, (), (lie,), peers=PEERS, epochs=EPOCHS, values=VALUES) for lie in (name, HONEST))
    assert outcome.epochs == EPOCHS
    assert outcome.goodput >= 0.75 * peace.goodput
    assert outcome.loss == pytest.approx(peace.loss, rel=0.01)
    assert outcome.spread <= 0.01, "one may have missed a round, and downloads"
    assert max(outcome.alone, outcome.downloads) <= 1
    assert outcome.named == {name} & FAULTS, "the users are told who it is"


@pytest.mark.parametrize("peers", [3, pytest.param(PEERS, marks=pytest.mark.slow_drill)])
def test_a_leader_that_keeps_others_apart_costs_little(peers: int) -> None:
    """Each of them averages with the leader alone, and finds out that most are ahead."""
    name = "leads_each_into_a_group_of_two"
    outcome, peace = (train(1, (), (lie,), peers=peers, epochs=EPOCHS) for lie in (name, HONEST))
    assert outcome.epochs == EPOCHS
    assert outcome.goodput >= 0.75 * peace.goodput
    assert outcome.loss == pytest.approx(peace.loss, rel=0.05)


@pytest.mark.parametrize("name", mostly_drills(["ghosts_take_part", "claims_a_billion_samples"]))
def test_who_trains_alone_does_not_wait_for_strangers_in_each_epoch(name: str) -> None:
    """Nobody has ever come. So it knows no rounds by which it could tell strangers from those who take part."""
    peace, attacked = train(1, peers=1, epochs=EPOCHS), train(1, (name,), peers=1, epochs=EPOCHS)
    assert attacked.epochs == peace.epochs == EPOCHS
    assert attacked.downloads == 0
    assert attacked.loss == pytest.approx(peace.loss, rel=0.05)


@pytest.mark.parametrize("peers", mostly_drills([2, PEERS]))
def test_members_that_do_not_exist_hold_nobody_up_for_long(peers: int) -> None:
    """Only a leader that expects them waits for them: three times five seconds in two minutes, then it is known."""
    outcome, peace = (
        train(1, (), (lie,), peers=peers, epochs=2 * EPOCHS) for lie in ("expects_a_million_others", HONEST)
    )
    check_equal(outcome, peace, goodput=0.88)
