"""A search for a group against random orders of events: nothing waits without an end, and memory is bounded."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.averaging.control import Absence, AveragingMode, GroupInfo
from shoal.averaging.groups import search as machine
from shoal.averaging.groups.memory import Refusal
from shoal.averaging.groups.search import (
    MAX_GROUP_BYTES,
    Accepts,
    Answers,
    Ask,
    AskFailure,
    Breaks,
    Fails,
    GroupSearch,
    InvitationEnds,
    Invite,
    Joins,
    Judge,
    Leaves,
    OfferEnds,
    Offers,
    Release,
    Remembered,
    Reply,
    Seen,
    Sent,
    Start,
    StopAsking,
    Terms,
    Tick,
)
from shoal.averaging.groups.settings import MatchmakingSettings, Trust
from shoal.averaging.messages import MAX_GATHERED_BYTES, Code, JoinRequest
from shoal.averaging.state.newcomer import DonorLeft
from shoal.p2p import Identity

RNG = random.Random(0)
OWN, *OTHERS = (Identity.generate(RNG).peer_id for _ in range(6))
START, WINDOW = 1e9, 5.0


def terms(expected=None, *, keep_open=False, gathered=0):
    return Terms(expected, None, keep_open, -math.inf, START + WINDOW, math.inf, gathered)


def make_search(mode=AveragingMode.NODE, target=None, unfit=(), **how):
    """A search that does not follow ``unfit`` peers."""
    looks = {"target_group_size": target, "min_group_size": 2, "min_matchmaking_time": WINDOW, "request_timeout": 3.0}
    sizes = {"mode": mode, "bandwidth": None, "min_vector_size": 0, "total_size": 8, "agreed": {}}
    own = MatchmakingSettings(**looks, **sizes)
    return GroupSearch(OWN, own, Trust(), lambda p: p not in unfit, "run.0b", terms(**how), START + WINDOW, START)


def request(expiration=START + 60, mode=0, **fields):
    return JoinRequest("run.0b", {}, expiration, mode, **fields)


def join(search, peer, now=START, nbytes=100, **fields):
    refusal = search.refusal_of(peer, asked := request(**fields), nbytes)
    return [refusal] if refusal is not None else search.on(Joins(peer, asked, nbytes), now)


peers, delays = st.sampled_from(OTHERS), st.floats(0.0, 8.0)


class AnyOrder(RuleBasedStateMachine):
    """The shell of a search whose network does anything, as far as it keeps the contracts of the actions."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.search = START, None
        self.asked, self.has_sent, self.on_offer = None, False, False
        self.invited, self.offering, self.waiting = set(), set(), set()

    def on(self, event):
        self.perform(self.search.on(event, self.now))

    def perform(self, actions):
        for action in actions:
            match action:
                case Ask(peer, on_offer):
                    assert self.asked is None, "one at a time"
                    assert not on_offer or peer in self.offering
                    self.asked, self.has_sent, self.on_offer = peer, False, on_offer
                case StopAsking():
                    assert self.asked is not None
                    self.end_of_call()
                case machine.Invite(peer):
                    self.invited.add(peer)
                case Release(peer):
                    self.offering.remove(peer)
                case Reply(peer, code):
                    assert peer in self.waiting
                    if code != Code.ACCEPTED:
                        self.waiting.remove(peer)
                case Start(followers):
                    assert len(followers) >= 1
                    self.waiting -= followers.keys()

    def end_of_call(self):
        peer, self.asked = self.asked, None
        if self.on_offer:
            self.offering.discard(peer)
            return peer
        return None

    def finish(self, event):
        held = self.end_of_call()
        self.on(event)
        if held is not None:
            self.on(OfferEnds(held))

    @precondition(lambda self: self.search is None)
    @rule(
        mode=st.sampled_from(AveragingMode),
        size=st.none() | st.integers(2, 4),
        expected=st.none() | st.integers(1, 6),
        unfit=st.sets(peers, max_size=2),
        refused=st.sets(peers, max_size=1),
    )
    def begin(self, mode, size, expected, unfit, refused):
        self.search = make_search(mode, size, unfit, expected=expected)
        for peer in refused:
            self.search.refuse(peer, Refusal("why"))

    @precondition(lambda self: self.search)
    @rule(seconds=delays)
    def wait(self, seconds):
        moment = self.search.next_moment(self.now)
        self.now += seconds if moment is None else max(0.0, min(seconds, moment - self.now))
        self.on(Tick())

    @precondition(lambda self: self.search)
    @rule(found=st.dictionaries(peers, delays), gone=st.dictionaries(peers, delays))
    def look(self, found, gone):
        def shown(table):
            return [(peer, self.now + delay - 2) for peer, delay in table.items()]

        self.on(Seen(shown(found), shown(gone)))

    @precondition(lambda self: self.search)
    @rule(expected=st.none() | st.integers(1, 6), keep_open=st.booleans())
    def change_terms(self, expected, keep_open):
        self.search.terms = self.search.terms._replace(expected=expected, keep_open=keep_open)
        self.on(Tick())

    @precondition(lambda self: self.search)
    @rule(former=st.permutations(OTHERS))
    def remember(self, former):
        self.on(Remembered(former))

    @precondition(lambda self: self.search)
    @rule(peer=peers, delay=delays, mode=st.sampled_from(AveragingMode), expected=st.none() | st.integers(1, 6))
    def join(self, peer, delay, mode, expected):
        asked = request(self.now + delay, int(mode), expected_group_size=expected)
        if self.search.refusal_of(peer, asked, 100) is None:
            self.waiting.add(peer)
            self.on(Joins(peer, asked, 100))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def hear(self, data):
        self.on(Leaves(data.draw(st.sampled_from(sorted(self.waiting)))))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def lose(self, data):
        peer = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(peer)
        self.on(Breaks(peer))

    @precondition(lambda self: self.search and not self.search.is_over)
    @rule(peer=peers, delay=delays)
    def offer(self, peer, delay):
        if peer not in self.offering:
            self.offering.add(peer)
            self.on(Offers(peer, self.now + delay))

    @precondition(lambda self: self.invited)
    @rule(data=st.data(), leader=st.none() | peers, delay=delays, fails=st.booleans())
    def answer_invitation(self, data, leader, delay, fails):
        peer = data.draw(st.sampled_from(sorted(self.invited)))
        self.invited.remove(peer)
        self.on(InvitationEnds(peer, arrived=False) if fails else InvitationEnds(peer, leader, self.now + delay))

    @precondition(lambda self: self.asked is not None and not self.has_sent)
    @rule()
    def send(self):
        self.has_sent = True
        self.on(Sent(self.asked))

    @precondition(lambda self: self.asked is not None and self.has_sent and not self.search.asking.follows)
    @rule(delay=delays)
    def accept(self, delay):
        self.on(Accepts(self.asked, self.now + delay))
        assert not self.search.followers, "a peer that follows leads nobody"

    @precondition(lambda self: self.asked is not None)
    @rule(failure=st.sampled_from(AskFailure))
    def fail(self, failure):
        self.finish(Fails(self.asked, failure))

    @precondition(lambda self: self.asked is not None and self.has_sent)
    @rule(code=st.sampled_from(Code), leader=st.none() | peers, delay=delays, starts=st.booleans())
    def answer(self, code, leader, delay, starts):
        group = GroupInfo(bytes(20), (OWN, self.asked), (b"", b"")) if starts and code == Code.GROUP_STARTS else None
        self.finish(Answers(self.asked, code, "", group, leader, self.now + delay))

    @invariant()
    def it_never_waits_for_nothing(self):
        if self.search is None or self.search.is_over:
            return
        is_asking = self.search.asking is not None
        assert is_asking == (self.asked is not None)
        assert is_asking or not self.search.settings.leads or self.search.start_time() > self.now

    @invariant()
    def memory_is_bounded(self):
        if self.search is not None:
            assert OWN not in self.search.peers
            assert len(self.search.peers) <= len(OTHERS)

    def teardown(self):
        if self.search is not None:
            self.asked = None
            self.perform(self.search.end())
            assert self.waiting == set(), "each peer that was accepted has an answer"
            assert self.offering <= {p for p, each in self.search.peers.items() if each.offer is machine.Offering.USED}
            assert self.search.on(Tick(), self.now) == []


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("awaited", "starts_at", "in_vain"),
    [
        (OTHERS[:2], START + 9, True),
        (OTHERS[:2], START + 1, False),
        (OTHERS[:1], START + 9, False),
        (OTHERS[:3], START + 9, False),
    ],
    ids=["for nobody", "in time", "for one of whom it knows more", "for one of whom it knows less"],
)
def test_a_late_leader_has_waited_for_nobody_or_for_a_member(awaited, starts_at, in_vain):
    leader, other = OTHERS[:2]
    search = make_search(expected=3)
    search.terms = search.terms._replace(awaited=awaited)
    for event in (Seen([(leader, START + 5)]), Sent(leader), Accepts(leader, START + 5)):
        search.on(event, START)
    group = GroupInfo(bytes(20), (leader, OWN, other), (b"", b"", b""))
    actions = search.on(Answers(leader, Code.GROUP_STARTS, "", group), starts_at)
    assert [each.in_vain for each in actions if isinstance(each, Judge)] == [in_vain]


def test_a_leader_counts_its_followers_numbers_only_if_it_has_none():
    """Otherwise any of them could make the others wait."""
    for own, starts in ((3, True), (None, False)):
        search = make_search(expected=own)
        join(search, OTHERS[0], expected_group_size=10**6)
        assert any(isinstance(each, Start) for each in join(search, OTHERS[1])) == starts


def test_a_search_forgets_peers_that_are_idle(monkeypatch):
    monkeypatch.setattr(machine, "MAX_CANDIDATES", 3)
    search = make_search(keep_open=True)
    join(search, OTHERS[0])
    for peer in OTHERS[1:]:
        search.on(Seen([(peer, START + 90)]), START)
    search.on(Tick(), START)
    assert OTHERS[0] in search.followers
    calling = {peer for peer, each in search.peers.items() if not each.is_idle}
    assert search.peers.keys() == calling, "all others were invited, and are kept until their answers are here"
    for peer in OTHERS[1:]:
        search.on(InvitationEnds(peer), START)
    assert len(search.peers) == 3


def test_a_group_fits_into_its_message():
    search = make_search(keep_open=True)
    nbytes, names = MAX_GATHERED_BYTES + 100, [Identity.generate(RNG).peer_id for _ in range(20)]
    codes = [join(search, peer, nbytes=nbytes)[0].code for peer in names]
    room = MAX_GROUP_BYTES // nbytes
    assert codes == [Code.ACCEPTED] * room + [Code.GROUP_IS_FULL] * (20 - room)
    assert join(search, OTHERS[0])[0].code == Code.ACCEPTED, "what is small still has room"


@pytest.mark.parametrize(
    ("events", "absence"),
    [
        ([], None),
        ([Seen([(OTHERS[0], START + 1)]), Fails(OTHERS[0], AskFailure.SILENT)], Absence.SILENT),
        ([Seen([(OTHERS[0], START + 1)]), Fails(OTHERS[0], AskFailure.UNREACHABLE)], Absence.UNREACHABLE),
        ([Seen([(OTHERS[0], START + 1)]), Answers(OTHERS[0], Code.REFUSED, "lies")], Absence.REFUSES),
        ([Seen([(OTHERS[0], START + 1)]), Answers(OTHERS[0], Code.SETTINGS_DIFFER, "x")], Absence.OTHER_SETTINGS),
        ([Seen([(OTHERS[0], START + 1)]), Answers(OTHERS[0], Code.GROUP_IS_FULL)], Absence.FULL),
        ([Seen([(OTHERS[0], START + 9)]), InvitationEnds(OTHERS[0], arrived=False)], Absence.UNREACHABLE),
        ([Seen([(OTHERS[0], START + 9)])], Absence.DID_NOT_JOIN),
    ],
)
def test_each_absence_has_its_reason(events, absence):
    search = make_search(expected=3)
    for event in events:
        search.on(event, START)
    causes = search.absences([OWN], START)
    assert {peer: cause.absence for peer, cause in causes.items()} == ({} if absence is None else {OTHERS[0]: absence})


def test_an_expected_peer_that_was_not_seen_did_not_come():
    search = make_search(expected=2)
    search.terms = search.terms._replace(awaited=[OTHERS[1]])
    assert search.absences([OWN], START)[OTHERS[1]].absence is Absence.DID_NOT_COME


def test_what_a_peer_said_outlives_later_failures():
    search = make_search()
    for event in (Seen([(OTHERS[0], START + 1)]), Answers(OTHERS[0], Code.REFUSED, "it sent NaN")):
        search.on(event, START)
    for event in (Seen([(OTHERS[0], START + 2)]), Fails(OTHERS[0], AskFailure.SILENT)):
        search.on(event, START)
    assert search.absences([OWN], START)[OTHERS[0]].words == "it sent NaN"


def test_an_invitation_is_repeated_only_if_it_did_not_arrive():
    search, late = make_search(), [(OTHERS[0], START + 90)]
    assert search.on(Seen(late), START) == [Invite(OTHERS[0])]
    search.on(InvitationEnds(OTHERS[0], arrived=False), START)
    assert search.on(Seen(late), START) == [Invite(OTHERS[0])]
    search.on(InvitationEnds(OTHERS[0]), START)
    assert search.on(Seen(late), START) == []


def test_the_documents_list_each_reason():
    told = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    reasons = [*(absence.key for absence in Absence), *(left.value for left in DonorLeft)]
    assert [reason for reason in reasons if f"\n| `{reason}` | " not in told] == []
