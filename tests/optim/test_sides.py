"""Which side of a run that came apart goes on: the rounds that peers tell, and what follows from them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.averaging import RoundResult
from shoal.optim.history.fork_choice import MAX_VARIANTS, ForkChoice, ForkTracker, PeerStanding, settle
from shoal.optim.history.journal import (
    BEGINNING,
    FORK_POINT_LIFETIME,
    LAST_ROUNDS,
    MAX_KEPT,
    MAX_LINEAGE_BYTES,
    ForkPoint,
    Lineage,
    RoundHistory,
)
from shoal.optim.progress.board import ProgressBoard
from shoal.optim.progress.records import Companion, LocalTrainingProgress, PerformanceEMA, RefreshPolicy
from shoal.p2p import PeerID

pytestmark = pytest.mark.once

PEERS = [PeerID(b"peer %d" % index) for index in range(6)]


class Peer:
    """What counts of a peer here: its epoch and its rounds."""

    def __init__(self, peer_id: PeerID, samples: float = 10.0, client: bool = False) -> None:
        self.peer_id, self.id, self.samples, self.client = peer_id, peer_id.to_bytes(), samples, client
        self.epoch, self.told_at = 0, 0.0
        self.fork_tracker = ForkTracker(self.id)
        self.fork_tracker.begin()

    def progress(self) -> LocalTrainingProgress:
        return LocalTrainingProgress(self.id, self.epoch, 0, 1.0, 0.0, self.client)

    def seen(self, now: float) -> Companion:
        return Companion(self.progress(), now + 60, lineage=self.standing(now).lineage, lineage_time=self.told_at)

    def standing(self, now: float) -> PeerStanding:
        lineage = Lineage.unpack(self.fork_tracker.lineage(now).pack())
        return PeerStanding(self.id, self.epoch, lineage, not self.client)


class Run:
    """A run in which everything is decided by the test: who meets whom, and who fails."""

    def __init__(self, *samples: float, seed: int = 0, clients: int = 0) -> None:
        self.rng, self.now = random.Random(seed), 0.0
        count = len(samples)
        self.peers = [Peer(PEERS[i], samples[i], i >= count - clients) for i in range(count)]

    def step(self, *members: Peer, failed: tuple[Peer, ...] = (), seconds: float = 1.0) -> None:
        """These peers make a step together; for those that have failed it is one alone."""
        self.now += seconds
        group_id = self.rng.randbytes(20)
        done = [peer for peer in members if peer not in failed]
        result = RoundResult(
            group_id,
            tuple(peer.peer_id for peer in members),
            tuple(peer.peer_id for peer in failed),
            tuple(0.0 if peer in failed else peer.samples for peer in members),
            1.0,
            (),
            False,
            0.1,
        )
        for peer in members:
            is_lone = peer in failed or len(done) < 2
            peer.fork_tracker.note_round(None if is_lone else result, peer.epoch + 1, self.now)
            peer.epoch, peer.told_at = peer.epoch + 1, self.now

    def steps(self, count: int, *members: Peer) -> None:
        for _ in range(count):
            self.step(*members)

    def take_over(self, peer: Peer, donor: Peer) -> None:
        self.now += 1
        peer.epoch, peer.told_at = donor.epoch, self.now
        peer.fork_tracker.adopt(donor.standing(self.now).lineage, donor.epoch, self.now)

    def verdict(self) -> ForkChoice:
        """What all see; it is an error if they see it differently."""
        seen = {self.verdict_of(peer) for peer in self.peers}
        standings = [peer.standing(self.now) for peer in self.peers]
        for _ in range(3):
            self.rng.shuffle(standings)
            seen.add(settle(standings))
        assert len(seen) == 1
        return seen.pop()

    def verdict_of(self, peer: Peer) -> ForkChoice:
        companions = {other.id: other.seen(self.now) for other in self.peers if other is not peer}
        peer.fork_tracker.changed = True
        return peer.fork_tracker.verdict(peer.progress(), companions, self.now)


def ids(*peers: Peer) -> frozenset[bytes]:
    return frozenset(peer.id for peer in peers)


def test_peers_with_other_settings_are_no_branch():
    """They were never together, so nothing came apart, and nobody takes over the state of the other."""
    run, now = Run(10, 10, 10, 10), 1000.0
    run.now = now
    own, mate, *others = run.peers
    run.steps(2, own, mate)
    run.steps(9, *others)
    board = ProgressBoard(own.id, False, 100, RefreshPolicy(), PerformanceEMA(), now)
    board.fork_tracker = own.fork_tracker
    board.finish_update(own.epoch, [mate.id], run.now)
    for each in (mate, *others):
        seen = each.seen(run.now)
        board.hear(seen.record, seen.expiration, run.now, lineage=seen.lineage)
    assert board.verdict(run.now).losers == ids(own, mate)
    board.company = SimpleNamespace(foreign=ids(*others), strangers=frozenset())
    assert board.verdict(run.now).losers == frozenset()
    board.company = None
    assert board.verdict(run.now).losers == ids(own, mate), "they fit after all"


# --- which side -------------------------------------------------------------------------------------------------------


def test_peers_that_train_together_are_one_side():
    run = Run(10, 10, 10)
    run.steps(20, *run.peers)
    assert run.verdict() == ForkChoice()


@pytest.mark.parametrize("epochs", [(8, 30), (3, 8), (2, 6), (30, 8)])
def test_three_prevail_over_one_whatever_the_epochs(epochs):
    run = Run(10, 10, 10, 10)
    *three, one = run.peers
    run.steps(5, *run.peers)
    run.steps(epochs[0], *three)
    run.steps(epochs[1], one)
    verdict = run.verdict()
    assert (verdict.winners, verdict.losers) == (ids(*three), ids(one))
    assert verdict.epoch == 5 + epochs[0]
    assert one.fork_tracker.epochs_given_up(one.epoch) == epochs[1]


def test_weight_of_the_last_common_round_decides():
    run = Run(10, 10, 30)
    *two, one = run.peers
    run.steps(5, *run.peers)
    run.steps(9, *two)
    run.steps(8, one)
    assert run.verdict().winners == ids(one)


def test_equal_weight_the_later_epoch_wins():
    run = Run(10, 10, 10, 10)
    first, second = run.peers[:2], run.peers[2:]
    run.steps(5, *run.peers)
    run.steps(8, *first)
    run.steps(12, *second)
    assert run.verdict().winners == ids(*second)


@pytest.mark.parametrize("seed", range(8))
def test_equal_halves_agree_and_stay_decided(seed):
    """They go on while they hear of each other, one of them an epoch ahead now and then."""
    run = Run(10, 10, 10, 10, seed=seed)
    first, second = run.peers[:2], run.peers[2:]
    run.steps(5, *run.peers)
    run.steps(9, *first)
    run.steps(9, *second)
    winners = run.verdict().winners
    assert winners in (ids(*first), ids(*second))
    for _ in range(10):
        run.step(*first)
        assert run.verdict().winners == winners
        run.step(*second)
        assert run.verdict().winners == winners


@pytest.mark.parametrize("count", [1, 2, 3])
def test_losers_may_switch_one_by_one(count):
    run = Run(*[10] * 2 * count)
    first, second = run.peers[:count], run.peers[count:]
    run.steps(5, *run.peers)
    run.steps(9, *first)
    run.steps(20, *second)
    for _ in range(count):
        assert run.verdict().winners == frozenset(peer.id for peer in second)
        loser = first.pop()
        run.take_over(loser, second[0])
        second.append(loser)
        run.steps(2, *first)
        run.steps(1, *second)
    assert run.verdict() == ForkChoice()


def test_unrelated_runs_follow_the_larger_one():
    """Epochs and rounds are easily invented."""
    run = Run(10, 10, 10)
    *two, one = run.peers
    run.steps(9, *two)
    run.steps(20, one)
    assert run.verdict().winners == ids(*two)


def test_unrelated_equal_runs_the_later_epoch_wins():
    run = Run(10, 10, 10, 10)
    two, one = run.peers[:2], run.peers[2:]
    run.steps(9, *two)
    run.steps(20, *one)
    assert run.verdict().winners == ids(*one)
    run.steps(10, *two)
    stable = run.verdict().winners
    for _ in range(6):
        run.step(*one)
        assert run.verdict().winners == stable
        run.step(*two)


# --- liars ------------------------------------------------------------------------------------------------------------


class Liar(Peer):
    """It tells whatever lineage it likes."""

    def __init__(self, peer_id: PeerID, lineage: Lineage, epoch: int) -> None:
        super().__init__(peer_id)
        self.told, self.epoch = lineage, epoch

    def standing(self, now: float) -> PeerStanding:
        return PeerStanding(self.id, self.epoch, self.told, True)

    def seen(self, now: float) -> Companion:
        return Companion(self.progress(), now + 60, lineage=self.told, lineage_time=now)


INVENTED = tuple(bytes([9, 9, 9, number]) for number in range(LAST_ROUNDS))


def losers_with(run: Run, *liars: Liar) -> set[frozenset[bytes]]:
    """Who has lost, in the eyes of all honest peers."""
    honest = list(run.peers)
    run.peers += liars
    return {run.verdict_of(peer).losers for peer in honest}


@pytest.mark.parametrize("fork_points", [(), (ForkPoint.of(BEGINNING, 1.0, INVENTED[0]),)])
def test_a_stranger_with_invented_rounds_takes_nobody_away(fork_points):
    run = Run(10, 10, 10)
    run.steps(20, *run.peers)
    liar = Liar(PEERS[5], Lineage(INVENTED, fork_points), 10**6)
    assert losers_with(run, liar) == {ids(liar)}


@pytest.mark.parametrize("claim", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("allies", [0, 1])
def test_claiming_all_of_a_round_wins_nothing(claim, allies):
    run = Run(10, 10, 10, 10)
    *three, gone = run.peers
    run.steps(5, *run.peers)
    common = gone.fork_tracker.lineage(run.now).rounds[-1]
    run.steps(9, *three)
    run.peers.remove(gone)
    told = Lineage((common, *INVENTED[1:]), (ForkPoint.of(common, claim, INVENTED[1]),))
    liars = [Liar(peer, told, 10**6) for peer in (gone.peer_id, *PEERS[4 : 4 + allies])]
    assert losers_with(run, *liars) == {ids(*liars)}


def test_a_crowd_on_one_network_counts_once():
    run = Run(10, 10, 10)
    run.steps(20, *run.peers)
    crowd = [PeerStanding(b"crowd %d" % i, 10**6, Lineage(INVENTED), True) for i in range(20)]
    standings = [*crowd, *(peer.standing(run.now) for peer in run.peers)]
    assert settle(standings, lambda peer: b"crowd" if peer.startswith(b"crowd") else peer).winners == ids(*run.peers)
    assert settle(standings).losers == ids(*run.peers)


# --- who can go on ----------------------------------------------------------------------------------------------------


def test_a_branch_without_donors_gives_way():
    run = Run(10, 10, 10, clients=2)
    node, *clients = run.peers
    run.steps(5, *run.peers)
    run.steps(9, node)
    run.steps(9, *clients)
    assert run.verdict().winners == ids(node)


def test_three_pieces_become_one():
    run = Run(30, 10, 10, 10, 10, 10)
    run.steps(5, *run.peers)
    pieces = [run.peers[:1], run.peers[1:3], run.peers[3:]]
    for index, piece in enumerate(pieces):
        run.steps(9 + index, *piece)
    verdict = run.verdict()
    assert verdict.winners | verdict.losers == ids(*run.peers)
    assert verdict.winners in [ids(*piece) for piece in pieces]


# --- no sides ---------------------------------------------------------------------------------------------------------


def test_a_round_that_failed_is_no_split():
    run = Run(10, 10, 10)
    run.steps(9, *run.peers)
    run.step(*run.peers, failed=(run.peers[0],))
    assert run.verdict() == ForkChoice()
    run.step(*run.peers[1:])
    run.step(*run.peers[1:])
    assert run.verdict() == ForkChoice(), "it has fallen behind after that"


def test_the_first_round_may_fail_too():
    run = Run(10, 10)
    run.step(*run.peers, failed=tuple(run.peers))
    assert run.verdict() == ForkChoice()


def test_an_idle_absent_peer_is_behind():
    run = Run(10, 10, 10)
    *two, away = run.peers
    run.steps(9, *run.peers)
    run.steps(100, *two)
    assert run.verdict() == ForkChoice()
    run.step(away)
    assert run.verdict() == ForkChoice(), "a step alone is a round that failed"
    run.step(away)
    assert run.verdict().losers == ids(away)


def test_a_newcomer_is_on_no_branch():
    run = Run(10, 10, 10, 10)
    *two, one, newcomer = run.peers
    run.steps(5, *two, one)
    run.steps(9, *two)
    run.steps(20, one)
    verdict = run.verdict()
    assert verdict.winners == ids(*two)
    assert newcomer.id not in verdict.winners | verdict.losers
    run.take_over(newcomer, two[0])
    assert run.verdict().winners == ids(*two, newcomer)


def test_newcomers_count_for_the_branch_they_joined():
    """Also if nobody of that side is left who was in the last common round."""
    run = Run(30, 10, 10)
    old, one, newcomer = run.peers
    run.steps(5, old, one)
    run.steps(9, old)
    run.take_over(newcomer, old)
    run.steps(3, old, newcomer)
    run.steps(30, one)
    assert run.verdict().winners == ids(old, newcomer)
    run.peers.remove(old)
    run.steps(9, newcomer)
    assert run.verdict().winners == ids(newcomer)


def test_parameter_averaging_makes_up_for_gradients_that_failed():
    run = Run(10, 10)
    one, other = run.peers
    run.steps(9, one, other)
    for _ in range(20):
        run.step(one, other, failed=(one, other))
        repair = RoundResult(b"", (one.peer_id, other.peer_id), (), (1.0, 1.0), 1.0, (), False, 0.1)
        one.fork_tracker.note_repair(repair)
        other.fork_tracker.note_repair(repair)
        assert run.verdict() == ForkChoice()
    run.steps(20, one)
    run.steps(20, other)
    assert run.verdict() != ForkChoice()


# --- whatever happens -------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, phases=[Phase.generate, Phase.shrink])
@given(st.data())
def test_any_history_ends_in_one_branch(data):
    """Peers split into groups at random, again and again; some rounds fail, some peers sleep, some take over states."""
    samples = data.draw(st.lists(st.sampled_from([5.0, 10.0, 25.0]), min_size=2, max_size=6))
    run = Run(*samples, seed=data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 4))):
        groups = data.draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))  # 0: asleep
        for group in (1, 2, 3):
            members = [peer for peer, own in zip(run.peers, groups, strict=True) if own == group]
            if not members:
                continue
            leader = max(members, key=lambda p: p.epoch)
            for peer in members:
                if peer is not leader and (peer.epoch < leader.epoch - 1 or data.draw(st.booleans())):
                    run.take_over(peer, leader)
            for _ in range(data.draw(st.integers(0, 14))):
                failed = tuple(peer for peer in members if run.rng.random() < 0.05)
                run.step(*members, failed=failed)
    for _ in range(ROUNDS_OF_GIVING_WAY):
        for peer in run.peers:
            give_way(run, peer)
    assert run.verdict() == ForkChoice(), "one side is left, and nobody goes back"


ROUNDS_OF_GIVING_WAY = 3


def give_way(run: Run, peer: Peer) -> None:
    """Let a peer do what follows from what it sees."""
    verdict = run.verdict_of(peer)
    assert not verdict.winners & verdict.losers
    assert bool(verdict.winners) == bool(verdict.losers)
    front = [other for other in run.peers if other.id in verdict.winners and other.epoch == verdict.epoch]
    assert bool(front) == bool(verdict.winners)
    if front and peer not in front and (peer.id in verdict.losers or peer.epoch < verdict.epoch - 1):
        run.take_over(peer, run.rng.choice(front))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(3, 6))
def test_single_failures_never_part_a_run(seed, steps, count):
    run = Run(*[10.0] * count, seed=seed)
    failed_before: tuple[Peer, ...] = ()
    for _ in range(steps):
        failed = tuple(peer for peer in run.peers if run.rng.random() < 0.2 and peer not in failed_before)
        failed = failed if len(failed) < count - 1 else ()
        run.step(*run.peers, failed=failed)
        assert run.verdict() == ForkChoice()
        failed_before = failed


# --- what is told -----------------------------------------------------------------------------------------------------


def history(*members: bytes) -> RoundHistory:
    made = RoundHistory(b"me")
    for number in range(3):
        made.note_round(bytes([number]) * 20, dict.fromkeys((b"me", *members), 1.0), number + 1, 0.0)
    return made


def test_no_fork_points_while_nobody_is_away():
    assert len(history(b"a", b"b").lineage(0.0).fork_points) == 1  # the beginning
    assert len(history(b"a", b"b").lineage(0.0).pack()) == 1 + 3 * 4 + 10


def test_who_says_goodbye_is_not_away():
    made = history(b"a", b"b")
    made.forget(b"b")
    for number in range(10, 20):
        made.note_round(bytes([number]) * 20, {b"me": 1.0, b"a": 1.0}, number, 0.0)
    assert len(made.lineage(0.0).fork_points) == 1


def test_a_parting_is_kept_for_a_day():
    made = history(b"a", b"b")
    for number in range(10, 30):
        made.note_round(bytes([number]) * 20, {b"me": 1.0, b"a": 1.0}, number, 60.0)
    (_, _, last) = made.lineage(60.0).fork_points
    assert last.round_id == bytes([2]) * 4
    assert last.next_id == bytes([10]) * 4
    assert last.kept == round(2 / 3 * 65535)
    assert len(made.lineage(FORK_POINT_LIFETIME + 1.0).fork_points) == 1
    for number in range(30, 40):
        made.note_round(bytes([number]) * 20, {b"me": 1.0, b"a": 1.0, b"b": 1.0}, number, 70.0)
    assert len(made.lineage(70.0).fork_points) == 1, "they have come back"


def test_it_stays_small_however_many_peers_are_lost():
    made = history(b"a")
    for number in range(300):
        lost = number.to_bytes(2, "big")
        made.note_round(lost * 2 + bytes(16), {b"me": 1.0, b"a": 1.0, lost: 1.0}, number, 0.0)
    packed = made.lineage(0.0).pack()
    assert len(packed) <= MAX_LINEAGE_BYTES < 100
    assert len(made.past) <= LAST_ROUNDS + MAX_KEPT


@given(st.binary(max_size=MAX_LINEAGE_BYTES + 2))
def test_lineages_round_trip_and_malformed_ones_are_refused(packed):
    try:
        lineage = Lineage.unpack(packed)
    except ValueError:
        return
    assert lineage.pack() == packed


def test_a_noisy_crowd_of_one_host_costs_little(monkeypatch):
    """All pairs of pieces are compared, so that many of them take long, and a crowd can be any number of pieces."""
    rng = random.Random(0)
    names = [rng.randbytes(32) for _ in range(3 * MAX_VARIANTS)]
    honest, crowd = [b"\xff" + bytes([number]) for number in range(4)], set(names)

    def told() -> Lineage:
        return Lineage(tuple(rng.randbytes(4) for _ in range(LAST_ROUNDS)))

    mine, theirs = told(), told()
    lineages = dict.fromkeys(honest[:3], mine) | {honest[3]: theirs}
    standings = [PeerStanding(peer, 5, lineages.get(peer) or told(), True) for peer in [*names, *honest]]
    verdict = settle(standings, lambda peer: "crowd" if peer in crowd else peer)
    assert verdict.winners == set(honest[:3])
    assert honest[3] in verdict.losers, "it is not crowded out"

    one = Peer(PEERS[0])
    one.fork_tracker.note_round(None, 1, 0.0)
    settled = []
    monkeypatch.setattr("shoal.optim.history.fork_choice.settle", lambda *_: settled.append(1) or ForkChoice())
    for moment in range(1000):
        companions = {
            p: Companion(LocalTrainingProgress(p, 0, 0, 1.0, 0.0, False), 60.0, lineage=told()) for p in names[:70]
        }
        one.fork_tracker.changed = True
        one.fork_tracker.verdict(one.progress(), companions, moment * 1e-3)
    assert len(settled) < 10, "in a second"
    one.fork_tracker.note_round(None, 2, 1.0)
    before = len(settled)
    one.fork_tracker.verdict(one.progress(), {}, 1.0)
    assert len(settled) == before + 1, "what this peer does counts at once"
