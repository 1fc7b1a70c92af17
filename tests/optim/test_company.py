"""What a peer does about others whose settings differ: which of them stops, when, and what it says."""

from __future__ import annotations

import logging
import pickle
import random

import msgspec
import pytest

from shoal.errors import SettingsMismatch
from shoal.optim.progress.run_settings import (
    MAX_PEERS,
    PATIENCE,
    SETTLING,
    TENSORS,
    Company,
    RunSettings,
    _joined,
    check_on_mismatch,
)
from shoal.p2p import Identity

RNG = random.Random(0)
A, B, C, D = (Identity.generate(RNG).peer_id.to_bytes() for _ in range(4))

OWN = RunSettings("Optimizer", {TENSORS: "1"}, {"target_batch_size": "4096"})
OTHER_MODEL = msgspec.structs.replace(OWN, needed={TENSORS: "2"})
OTHER_TARGET = msgspec.structs.replace(OWN, shared={"target_batch_size": "64"})


class Peer:
    """A peer that looks around every second, and the others that it can reach."""

    def __init__(self, on_mismatch: str = "raise") -> None:
        self.company, self.others, self.mates = Company("digits", OWN, on_mismatch), set[bytes](), set[bytes]()
        self.hosts, self.now = dict[bytes, str](), 1000.0

    def meet(self, peer: bytes, settings: RunSettings | None, *, was_first: bool = False) -> None:
        self.others.add(peer)
        if settings is None:
            return
        self.company.hear_digest(peer, settings.digest, was_first=was_first)
        if self.company.wants_settings_of(peer):
            self.company.hear_settings(peer, settings.shown_to(OWN), was_first=False)

    def train(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.company.look(lambda: self.others, self.mates, self.now, lambda peer: self.hosts.get(peer, str(peer)))


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_a_newcomer_with_another_model_stops_after_a_minute_without_company(peer):
    peer.meet(A, OTHER_MODEL, was_first=True)
    peer.train(PATIENCE)
    with pytest.raises(SettingsMismatch, match="the averaged tensors differ") as caught:
        peer.train(2)
    assert "this peer does not fit run 'digits': nobody else with its settings is there after 60 s" in str(caught.value)
    assert "choose another run_id here" in str(caught.value)
    assert len(caught.value.peers) == len(caught.value.differences) == 1
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.peers) == (str(caught.value), caught.value.peers)
    with pytest.raises(SettingsMismatch):
        peer.train(2)


def test_a_newcomer_with_another_option_stops_at_once(peer):
    """It could average with the others, and each would count by rules of its own."""
    peer.meet(A, OTHER_TARGET, was_first=True)
    with pytest.raises(SettingsMismatch, match="target_batch_size is 4096 here and 64 there"):
        peer.train(1)


def test_two_newcomers_that_find_each_other_both_stop(peer):
    """Nothing tells which of them is wrong."""
    other = Peer()
    other.company = Company("digits", OTHER_TARGET)
    peer.meet(A, OTHER_TARGET, was_first=True)
    other.meet(B, OWN, was_first=True)
    for each in (peer, other):
        with pytest.raises(SettingsMismatch):
            each.train(1)


def test_it_waits_for_the_settings_of_all_peers_that_it_has_heard_of(peer):
    """The first that answers may be the stranger."""
    peer.meet(A, OTHER_TARGET, was_first=True)
    peer.meet(B, None)
    peer.train(SETTLING - 1)
    peer.meet(B, OWN)
    peer.train(2 * PATIENCE)


def test_a_silent_peer_holds_up_the_verdict_for_a_short_time_only(peer):
    peer.meet(A, OTHER_TARGET, was_first=True)
    peer.meet(B, None)
    peer.train(SETTLING)
    with pytest.raises(SettingsMismatch):
        peer.train(2)


@pytest.mark.parametrize("stranger", [OTHER_MODEL, OTHER_TARGET], ids=["model", "option"])
def test_a_peer_in_company_warns_once_of_a_stranger(peer, stranger, caplog):
    peer.meet(A, OWN, was_first=True)
    peer.meet(B, stranger, was_first=True)
    peer.meet(C, stranger)
    peer.train(3 * PATIENCE)
    [line] = caplog.messages
    assert "does not fit this one in run 'digits'" in line
    assert "Correct the wrong one and restart it" in line


def test_mates_of_the_last_round_are_company_although_they_tell_no_settings(peer):
    """They may be of a version that does not."""
    peer.meet(A, None)
    peer.mates = {A}
    peer.meet(B, OTHER_MODEL, was_first=True)
    peer.train(2 * PATIENCE)


def test_a_newcomer_does_not_stop_the_peer_that_was_there(peer, caplog):
    peer.meet(A, OTHER_MODEL)
    peer.train(10 * PATIENCE)
    assert len(caplog.messages) == 1


def test_one_host_is_one_vote(peer):
    for liar in (A, B, C):
        peer.meet(liar, OTHER_TARGET)
        peer.hosts[liar] = "one host"
    peer.train(10 * PATIENCE)


def test_a_lone_peer_gives_way_to_two_hosts_that_agree(peer):
    peer.meet(A, OTHER_TARGET)
    peer.train(2)
    peer.meet(B, OTHER_TARGET)
    with pytest.raises(SettingsMismatch):
        peer.train(2)


def test_strangers_that_differ_from_each_other_are_no_majority(peer):
    for number, stranger in enumerate((A, B, C)):
        peer.meet(stranger, msgspec.structs.replace(OWN, shared={"target_batch_size": str(number)}))
    peer.train(10 * PATIENCE)


def test_company_in_between_begins_the_minute_again(peer):
    peer.meet(A, OTHER_MODEL, was_first=True)
    peer.train(PATIENCE - 5)
    peer.meet(B, OWN)
    peer.train(10)
    peer.others.remove(B)
    peer.train(PATIENCE)
    with pytest.raises(SettingsMismatch):
        peer.train(5)


def test_strangers_that_leave_do_not_stop_anybody(peer):
    peer.meet(A, OTHER_MODEL, was_first=True)
    peer.train(PATIENCE - 5)
    peer.others.clear()
    peer.train(2 * PATIENCE)


def test_the_largest_side_is_named(peer):
    peer.meet(A, OTHER_TARGET, was_first=True)
    for each in (B, C, D):
        peer.meet(each, OTHER_MODEL, was_first=True)
    with pytest.raises(SettingsMismatch) as caught:
        peer.train(2 * PATIENCE)
    assert len(caught.value.peers) == 3
    assert "tensors differ" in caught.value.differences[0]


def test_a_peer_that_waits_says_at_once_what_differs_and_then_nothing(peer, caplog):
    peer.meet(A, OTHER_MODEL, was_first=True)
    peer.train(1)
    [line] = caplog.messages
    assert line.startswith("waiting up to 60 s for a peer that fits this one; peer …")
    assert line.endswith(" does not: the shapes, types or roles of the averaged tensors differ")
    peer.train(PATIENCE - 1)
    assert caplog.messages == [line]


def test_peers_of_which_it_does_not_know_yet_whether_they_fit_may_train_another_model(peer):
    peer.company.hear_digest(A, OTHER_MODEL.digest, was_first=True)
    peer.company.hear_digest(B, OWN.digest, was_first=True)
    assert peer.company.foreign == {A}
    peer.company.hear_settings(A, OTHER_TARGET, was_first=True)
    assert peer.company.foreign == set(), "it trains by other rules, and can average"
    peer.company.hear_settings(A, OTHER_MODEL, was_first=True)
    assert peer.company.foreign == {A}


def test_a_log_line_has_room_for_the_first_differences_only():
    few, many = ["a is 1 here and 2 there"], [f"parameter '{n}.weight' has the shape (10, 128) here" for n in range(9)]
    assert _joined(few * 2) == "; ".join(few * 2)
    assert _joined(many) == f"{many[0]}; and 8 more"


def test_with_warn_it_continues_with_one_warning(caplog):
    peer = Peer("warn")
    peer.meet(A, OTHER_MODEL, was_first=True)
    peer.train(10 * PATIENCE)
    _, line = caplog.messages
    assert "this peer does not fit run 'digits'" in line
    assert "on_mismatch is 'warn'" in line


def test_only_peers_that_cannot_average_are_left_out(peer):
    peer.meet(A, OTHER_MODEL)
    peer.meet(B, OTHER_TARGET)
    peer.meet(C, OWN)
    assert peer.company.strangers == {A}


def test_a_peer_that_comes_back_with_other_settings_is_compared_again(peer):
    peer.meet(A, OTHER_TARGET, was_first=True)
    peer.meet(A, OWN)
    peer.train(2 * PATIENCE)


def test_memory_is_bounded_and_the_log_is_not_filled(peer, caplog):
    for number in range(MAX_PEERS + 100):
        stranger = number.to_bytes(4, "big") + A[4:]
        peer.meet(stranger, msgspec.structs.replace(OWN, kind=f"kind {number}"))
    assert len(peer.company._known) == MAX_PEERS
    with caplog.at_level(logging.WARNING):
        peer.train(2)
    assert len(caplog.messages) <= 5
    assert len(peer.company._warned_of) <= MAX_PEERS


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="on_mismatch must be 'raise' or 'warn', got 'ignore'"):
        check_on_mismatch("ignore")
