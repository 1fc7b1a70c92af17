"""When a peer to whose round nobody comes makes an update alone: not while there are others, who would not have it."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from shoal.averaging import StepControl
from shoal.errors import AllreduceException
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import ExtraTensors
from shoal.optim.diloco.outer_averager import OuterDonor
from shoal.optim.diloco.rounds import OuterRounds
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.diloco.slots import ANY_SLOT, Attendance, Schedule, SlotCounter
from shoal.optim.history.window import EPOCHS_AHEAD
from shoal.optim.options import with_defaults
from shoal.p2p import PeerID
from tests.optim.diloco.quadratic import A
from tests.optim.diloco.test_fragment_updates import Peer

TIMES = {"matchmaking_time": 1.0, "averaging_timeout": 5.0}
OPTIONS = {"run_id": "run", "sync_every": 2, "batch_size_per_step": 1, **TIMES}


class Known(Attendance):
    """Knows others only by the slots at which they are."""

    def __init__(self, tracker, *args):
        super().__init__(tracker, *args)
        self.tracker, self.not_worth_it, self.electors = tracker, set(), set()

    def note(self, flight, waited):
        pass

    def is_cut_off(self, now):
        return False

    def slots_of_companions(self, now):
        return dict(enumerate(self.tracker.slots))

    def worth_waiting_for(self, peers):
        return peers - self.not_worth_it

    def electorate(self, now, earliest):
        return self.electors


class Tracker:
    """Knows the slots of others."""

    def __init__(self, slots, dead):
        self.slots, self.own, self.dead = [slot for slot in slots if slot not in dead], 0, dead
        records = [SimpleNamespace(epoch=slot, peer_id=bytes([slot % 256])) for slot in slots]
        self.board = SimpleNamespace(companions_to_call=lambda now: records, batch_time=None)
        self.board.set_target = lambda steps: None

    def expected_members(self, until_epoch):
        return {slot for slot in self.slots if self.own <= slot <= until_epoch}

    def still_expected(self, last_epochs):
        return {peer for peer in last_epochs if peer.to_bytes()[0] not in self.dead}

    def pause_updates(self):
        return nullcontext()

    def declare_epoch_over(self, patience):
        pass

    def update_epoch(self, epoch, members):
        self.own = epoch


def rounds_with(slots, own, dead=(), client_mode=False, fragments=1, **options):
    peer = Peer(A)
    given = {**OPTIONS, "client_mode": client_mode, **options}
    settings = OuterSettings.resolve(**with_defaults(DiLoCo, given))
    counter, tracker = SlotCounter(Schedule(1, 2)), Tracker(slots, dead)
    counter.go_to(own)
    tracker.own = own
    inner = SimpleNamespace(forget_what_is_not_finite=None)
    donor = OuterDonor(counter, [peer.updates], threading.RLock(), inner, False, ExtraTensors(()))
    averager = SimpleNamespace(donor=donor, client_mode=client_mode, group_size=None, is_giving=False)
    rounds = OuterRounds(settings, tracker, averager)
    rounds.attendance = Known(tracker, settings, fragments)
    peer.train()
    return rounds, peer


@pytest.mark.parametrize(
    ("slots", "own", "options", "makes_one"),
    [
        ([], 5, {}, True),
        ([6], 5, {}, False),
        ([4], 5, {}, True),
        ([9], 5, {"fragment_sync_delay": None}, False),
        ([3], 5, {"fragment_sync_delay": None}, False),
        ([2], 5, {"fragment_sync_delay": None}, True),
        ([5], 5, {"dead": [5]}, True),
        ([6], 5, {"average": "parameters"}, True),
        ([4], 5, {"client_mode": True}, False),
        ([], 5, {"client_mode": True}, True),
    ],
    ids=[
        "nobody",
        "ahead",
        "behind",
        "far ahead",
        "behind where rounds overlap",
        "standing still",
        "dead",
        "parameters of its own",
        "behind a client, from which they could not download it",
        "a client and nobody else",
    ],
)
def test_a_lone_update_needs_an_empty_run(monkeypatch, slots, own, options, makes_one):
    rounds, peer = rounds_with(slots, own, **options)
    before = peer.model
    now = 1000.0
    monkeypatch.setattr("shoal.optim.diloco.slots.time.monotonic", lambda: now)
    rounds.end_slot()
    if slots == [own - EPOCHS_AHEAD] and rounds.settings.overlaps:
        assert rounds.counter.slot == own, "others get some time to catch up"
        now += rounds.settings.straggler_patience
        rounds.end_slot()
    rounds.end_flights()
    assert peer.updates.journal.newest.version == int(makes_one)
    assert rounds.counter.slot == own + 1
    if not makes_one:
        assert torch.equal(peer.model, before)
        assert peer.updates.contribution.effort.steps == 2  # they count in the next round


@pytest.mark.parametrize("options", [{}, {"fragment_sync_delay": None}], ids=["at once", "later"])
def test_a_client_goes_back_to_the_others(options):
    """They do not follow a client that was alone for a while, and each would go on for itself."""
    rounds, peer = rounds_with([7, 40, 50], 90, dead=[50], client_mode=True, **options)
    before = peer.model
    rounds.end_slot()
    assert rounds.counter.slot == rounds.tracker.own == 40
    assert peer.updates.flight is None
    assert torch.equal(peer.model, before)
    rounds, _ = rounds_with([40, 50], 90, dead=[50], **options)
    rounds.end_slot()
    assert rounds.counter.slot == 91, "the other one can follow this one"


def test_a_lone_leader_goes_back_to_several():
    """Else it would leave them, and make updates alone."""
    rounds, peer = rounds_with([38, 40], 43, fragment_sync_delay=None)
    rounds.end_slot()
    assert rounds.counter.slot == 40
    assert peer.updates.flight is None
    rounds.tracker.slots = [38, 39]
    rounds.go_to(43)
    rounds.end_slot()
    assert rounds.counter.slot == 44, "they do not train"
    rounds.tracker.slots = [39, 42]
    rounds.end_slot()
    assert rounds.counter.slot == 45, "one of them is not far behind"


def test_an_interrupted_round_is_no_lone_update():
    rounds, peer = rounds_with([5], 5)

    def step(**options):
        raise KeyboardInterrupt

    rounds.averager.step, rounds.averager.extra = step, None
    with pytest.raises(KeyboardInterrupt):
        rounds.end_slot()
    assert peer.updates.flight is None
    assert peer.updates.journal.newest.version == 0
    assert peer.updates.contribution.effort.steps == 2


@pytest.mark.parametrize(
    ("slots", "delay", "is_passed_over"),
    [([6, 7, 7], 1, True), ([6, 6, 7], 1, False), ([6, 7, 7], None, False), ([6, 8, 8], None, True)],
    ids=["half are beyond", "one is beyond", "may be in rounds of both fragments", "beyond both"],
)
def test_a_search_most_have_passed_is_given_up(caplog, slots, delay, is_passed_over):
    """The one that is behind gives up, and meets the others in the next slot."""
    caplog.set_level(logging.DEBUG, "shoal")
    rounds, peer = rounds_with(slots, 5, fragments=2, fragment_sync_delay=delay, matchmaking_time=0.01)
    rounds.fragments = [peer.updates, Peer(A).updates]
    others = dict(enumerate(slots))
    rounds.attendance.electors = set(others)
    rounds.tracker.still_expected = lambda last: {peer for peer in last if others[peer] <= last[peer]}
    flight = peer.updates.begin(5)
    flight.control = StepControl(0.0)
    if not is_passed_over:  # then it has waited longer
        threading.Timer(0.1, flight.control.set_exception, [AllreduceException("nobody came")]).start()
    rounds.end_flights()
    assert peer.updates.flight is None
    assert ("most others have continued without it" in caplog.text) is is_passed_over
    assert flight.control.cancelled() is is_passed_over


def test_unproven_peers_behind_are_not_waited_for():
    rounds, _ = rounds_with([4, 5, 6], 5, fragments=2, fragment_sync_delay=None)
    rounds.tracker.board.companions_to_call = lambda now: [SimpleNamespace(epoch=4, peer_id=bytes([4]))]
    behind = PeerID(bytes([4]))
    assert rounds.attendance.expected(5) == {5, 6, behind}
    rounds.attendance.not_worth_it = {behind}
    assert rounds.attendance.expected(5) == {5, 6}


@pytest.mark.parametrize(
    ("slots", "makes_one"), [([], True), ([ANY_SLOT], False), ([9], False)], ids=["nobody", "anywhere", "ahead"]
)
def test_a_failed_search_alone_may_be_an_update(slots, makes_one):
    rounds, peer = rounds_with(slots, 5)
    flight = peer.updates.begin(5)
    flight.control = StepControl(0.0)
    flight.control.set_exception(AllreduceException("nobody came"))
    rounds.end_flights()
    assert peer.updates.journal.newest.version == int(makes_one)
    assert peer.updates.flight is None
