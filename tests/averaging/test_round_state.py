"""The end of a round as a pure state machine: in any order of events it ends, with the same averages for all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.averaging.control import AveragingMode, GroupInfo, LossCause
from shoal.averaging.messages import Late, Loss, MembersLost, Resigns, Restart, RoundMessage, RoundStatus
from shoal.averaging.round.state import (
    Attempt,
    AttemptEnded,
    CallOff,
    CommitRound,
    Coordinate,
    CutLink,
    Event,
    Exchanged,
    GraceOver,
    HasDelivered,
    LinkBroke,
    Linked,
    LinkLost,
    Lost,
    MemberLink,
    MemberStatus,
    PartsSent,
    PatienceOver,
    Reported,
    Resign,
    RoundState,
    StartGrace,
    StatusKnown,
    TellMembers,
    make_plan,
    on,
)
from shoal.p2p import PeerID

PARTS = 3
NO_AVERAGE = "local values"
GONE = Loss(LossCause.REFUSED, "dead")


def group_of(size: int) -> GroupInfo:
    peers = tuple(PeerID(bytes([index + 1]) * 34) for index in range(size))
    return GroupInfo(b"group", peers, (b"",) * size, (AveragingMode.NODE,) * size, (1,) * size)


def state_of(size: int, own: int = 0, quorum: int | None = None, *, passes_on: bool = True) -> RoundState:
    return RoundState(group_of(size), own, [PARTS] * size, quorum, passes_on=passes_on)


@dataclass(eq=False)
class Peer:
    """A member of the model, with what it holds: by reducer, the version of each part's average from the first on."""

    index: int
    state: RoundState
    held: list[list[str]]
    is_alive: bool = True
    has_exchanged: bool = False
    is_late: bool = False
    ended: str = ""
    """How the round has ended here; empty: it has not."""
    tried: int = 0
    """The number of candidates for coordinator that it has given up."""
    link: MemberLink | None = None
    """Its link to the present candidate."""
    news: deque[RoundMessage | CommitRound] = field(default_factory=deque)
    """Messages on this link that have not arrived."""
    attempt: Attempt | None = None
    """The attempt that it carries out as a coordinator."""
    is_called_off: bool = False
    grace: bool = False
    attempts: int = 0

    def __str__(self) -> str:
        members = [(member.status.name, member.link is not None) for member in self.state.members]
        fate = self.ended or ("alive" if self.is_alive else "dead")
        return f"{self.index}: {fate}, follows {self.tried}, late: {self.is_late}, {self.counts}, {members}"

    @property
    def counts(self) -> list[int]:
        return [len(each) for each in self.held]


class EndOfRound(RuleBasedStateMachine):
    """Members finish their exchange, link, lose links, come back, die, and coordinate, in any order."""

    passes_on = True
    quorum: int | None = None

    @initialize(size=st.integers(2, 5))
    def begin(self, size: int) -> None:
        self.size = size
        self.peers = [
            Peer(index, state_of(size, index, self.quorum, passes_on=self.passes_on), [[] for _ in range(size)])
            for index in range(size)
        ]
        for peer in self.peers:
            self.look_for_coordinator(peer)

    # --- what the shells do -------------------------------------------------------------------------------------------

    def emit(self, peer: Peer, event: Event) -> None:
        for action in on(peer.state, event):
            match action:
                case TellMembers(links, message):
                    for follower in self.followers(links):
                        follower.news.append(message)
                case CutLink(link, is_replaced=False):
                    for follower in self.followers([link]):  # it calls again, and may come in vain
                        follower.link = None
                        follower.news.clear()
                case CommitRound(links, _):
                    for follower in self.followers([*links.values()]):
                        follower.news.append(action)
                    peer.ended = peer.ended or "committed"
                case Attempt():
                    assert peer.attempt is None, "one attempt at a time"
                    peer.attempt, peer.is_called_off = action, False
                    peer.attempts += 1
                case CallOff():
                    peer.is_called_off = True
                case StartGrace():
                    peer.grace = True
                case Resign():
                    self.abandon(peer)
                    self.give_up(peer, "resigned")

    def followers(self, links) -> list[Peer]:
        return [peer for peer in self.peers if peer.link is not None and peer.link in links and peer.is_alive]

    def candidate(self, peer: Peer) -> Peer | None:
        return self.peers[peer.tried] if peer.tried < self.size else None

    def look_for_coordinator(self, peer: Peer) -> None:
        if self.candidate(peer) is peer:
            self.emit(peer, Coordinate(waits=True))
            if peer.has_exchanged:
                self.emit(peer, Exchanged(peer.counts))
        elif self.candidate(peer) is None:
            peer.ended = "alone"

    def give_up(self, peer: Peer, why: str) -> None:
        """Follow the next candidate."""
        candidate = self.candidate(peer)
        assert candidate is not None
        if candidate is not peer:
            self.emit(peer, Lost(candidate.index, Loss(LossCause.OTHER, why)))
        peer.tried, peer.link = peer.tried + 1, None
        peer.news.clear()
        self.look_for_coordinator(peer)

    def abandon(self, peer: Peer) -> None:
        peer.is_late, peer.has_exchanged = True, True
        peer.held = [[] for _ in range(self.size)]
        peer.state.forgive()

    def report(self, peer: Peer) -> None:
        coordinator = self.candidate(peer)
        if coordinator is not None and peer.link is not None and peer.has_exchanged and not peer.is_late:
            self.emit(coordinator, Reported(peer.index, peer.link, peer.counts))

    # --- what happens -------------------------------------------------------------------------------------------------

    def busy(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.is_alive and not peer.ended]

    def one(self, data, peers: list[Peer]) -> Peer:
        return peers[data.draw(st.integers(0, len(peers) - 1))]

    @rule(data=st.data())
    def finish_exchange(self, data) -> None:
        if waiting := [peer for peer in self.busy() if not peer.has_exchanged]:
            peer = self.one(data, waiting)
            # A member lacks averages only of reducers that are dead, or do not reach it.
            whole = [reducer.is_alive and not peer.state.members[reducer.index].failed for reducer in self.peers]
            self.exchange(peer, [PARTS if each else data.draw(st.integers(0, PARTS)) for each in whole])

    def exchange(self, peer: Peer, counts: list[int]) -> None:
        peer.has_exchanged = True
        peer.held = [["first"] * count for count in counts]
        for index in range(self.size):
            self.emit(peer, PartsSent(index))
        self.emit(peer, Exchanged(peer.counts))
        coordinator = self.candidate(peer)
        if peer.link is not None and coordinator is not None:
            self.emit(coordinator, HasDelivered(peer.link))
        self.report(peer)

    @rule(data=st.data())
    def link(self, data) -> None:
        if unlinked := [peer for peer in self.busy() if peer.link is None and self.candidate(peer) is not peer]:
            self.follow(self.one(data, unlinked))

    def follow(self, peer: Peer) -> None:
        coordinator = self.candidate(peer)
        assert coordinator is not None
        member = coordinator.state.members[peer.index]
        if not coordinator.is_alive or coordinator.ended in ("alone", "result"):
            self.give_up(peer, "dead, or has left")
        elif member.unconfirmed:
            peer.news.append(CommitRound({}, keeps=False))
            self.hear(peer)
        elif coordinator.state.is_over_for(member):
            peer.state.missed = True
            self.give_up(peer, "missed")
        else:
            peer.link = MemberLink(1.0)
            peer.news.clear()
            self.emit(coordinator, Linked(peer.index, peer.link, peer.is_late, peer.state.missed))
            if peer.has_exchanged:
                self.emit(coordinator, HasDelivered(peer.link))
            self.report(peer)

    @rule(data=st.data(), returns=st.booleans())
    def break_link(self, data, returns: bool) -> None:
        if linked := [peer for peer in self.busy() if peer.link is not None]:
            self.cut(self.one(data, linked), returns=returns)

    def cut(self, peer: Peer, *, returns: bool) -> None:
        coordinator, link = self.candidate(peer), peer.link
        assert coordinator is not None
        assert link is not None
        peer.link = None
        peer.news.clear()
        self.emit(coordinator, LinkBroke(peer.index, link))
        if not returns:
            self.emit(coordinator, LinkLost(peer.index, link, GONE))

    @rule(data=st.data())
    def lose_each_other(self, data) -> None:
        peer, other = self.one(data, self.peers), self.one(data, self.peers)
        if peer is not other and peer.is_alive and not peer.ended and self.candidate(peer) is not other:
            self.emit(peer, Lost(other.index, Loss(LossCause.CONNECTION_BROKE, "unreachable from here")))

    @precondition(lambda self: sum(peer.is_alive for peer in self.peers) > 2)
    @rule(data=st.data())
    def crash(self, data) -> None:
        peer = self.one(data, [peer for peer in self.peers if peer.is_alive])
        if peer.link is not None:
            self.cut(peer, returns=False)
        peer.is_alive = False
        for follower in self.busy():
            if self.candidate(follower) is peer and follower.link is not None:
                self.give_up(follower, "dead")

    @rule(data=st.data())
    def arrive(self, data) -> None:
        if told := [peer for peer in self.busy() if peer.news]:
            self.hear(self.one(data, told))

    def hear(self, peer: Peer) -> None:
        coordinator, message = self.candidate(peer), peer.news.popleft()
        assert coordinator is not None
        match message:
            case CommitRound():
                coordinator.state.members[peer.index].unconfirmed = False
                peer.ended = "told"
                for index in coordinator.state.dead - {peer.index} if not peer.is_late else ():
                    self.emit(peer, Lost(index, GONE, is_hearsay=True))
                if not peer.is_late:
                    self.emit(peer, Coordinate(waits=False))
            case Resigns():
                peer.state.closed_early = True
                self.give_up(peer, "resigned")
            case Late():
                self.abandon(peer)
            case MembersLost(lost) if not peer.is_late:
                for index, cause in lost.items():
                    if index != peer.index:
                        self.emit(peer, Lost(index, Loss(cause, "told"), is_hearsay=True))
            case Restart():
                self.report(peer)

    @rule(data=st.data())
    def get_the_result(self, data) -> None:
        """A late member gets it from a coordinator that has committed and keeps it."""
        if late := [peer for peer in self.busy() if peer.is_late and peer.link is not None and not peer.news]:
            self.fetch(self.one(data, late))

    def fetch(self, peer: Peer) -> None:
        coordinator = self.candidate(peer)
        assert coordinator is not None
        if coordinator.state.committed:
            assert coordinator.state.closed_early, "somebody late is linked, and no result is kept"
            peer.held, peer.ended = [[*each] for each in coordinator.held], "result"
            for follower in self.busy():
                if follower.link is not None and self.candidate(follower) is peer:
                    self.give_up(follower, "has left")

    @rule(data=st.data())
    def work_on_gaps(self, data) -> None:
        if working := self.working():
            peer = self.one(data, working)
            assert peer.attempt is not None
            partial = {index: data.draw(st.integers(0, PARTS * self.size)) for index in peer.attempt.plan.missing}
            self.end_attempt(peer, partial if peer.is_called_off else None)

    def working(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.is_alive and peer.attempt is not None]

    def end_attempt(self, peer: Peer, partial: dict[int, int] | None) -> None:
        attempt, peer.attempt = peer.attempt, None
        assert attempt is not None
        plan = attempt.plan
        members = {index: self.peers[index] for index, link in attempt.links.items() if self.peers[index].link is link}
        members[peer.index] = peer
        versions = {key: f"again by {peer.index}, attempt {peer.attempts}" for key in plan.again}
        for (reducer, index), source in plan.sources.items():
            if self.passes_on and source in members and len(members[source].held[reducer]) > index:
                versions[reducer, index] = members[source].held[reducer][index]
        for index, member in members.items():
            wanted = plan.parts_missing(index)
            for reducer, part in wanted if partial is None else wanted[: partial.get(index, 0)]:
                if member.is_alive and len(member.held[reducer]) == part:
                    member.held[reducer].append(versions.get((reducer, part), NO_AVERAGE))
        self.emit(peer, AttemptEnded(partial is None, peer.counts))
        for index, member in members.items():
            if partial is None and index != peer.index:
                self.report(member)

    @rule(data=st.data())
    def time_passes(self, data) -> None:
        if coordinating := [peer for peer in self.busy() if self.candidate(peer) is peer]:
            peer = self.one(data, coordinating)
            if peer.grace:
                peer.grace = False
                self.emit(peer, GraceOver())
            else:
                self.ask_absent(peer, is_late=False)

    def ask_absent(self, peer: Peer, *, is_late: bool) -> None:
        for index in peer.state.absent:
            other = self.peers[index]
            if not other.is_alive:
                self.emit(peer, Lost(index, GONE))
                continue
            status = RoundStatus.FINISHED if other.ended in ("told", "committed", "result") else RoundStatus.RUNNING
            status = RoundStatus.LEFT if other.ended == "alone" else status
            self.emit(peer, StatusKnown(index, status, is_late, never_began=False))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def fields_agree(self) -> None:
        for peer in getattr(self, "peers", ()):
            state = peer.state
            assert state.attempt is None or (state.coordinates is not None and not state.committed)
            for member in state.members:
                assert member is state.own or (member.loss is not None) == member.failed
                assert not member.seen_failing or member.failed or member.status is MemberStatus.GONE

    @invariant()
    def all_have_the_same_averages(self) -> None:
        """Of those to whom the round is over; what a member does not hold it reports as missing."""
        done = [peer for peer in getattr(self, "peers", ()) if peer.ended and peer.ended != "alone"]
        for reducer in range(getattr(self, "size", 0)):
            for index in range(PARTS):
                versions = {peer.held[reducer][index] for peer in done if len(peer.held[reducer]) > index}
                versions.discard(NO_AVERAGE)
                assert len(versions) < 2, f"part {index} of {reducer}: {versions}"

    def teardown(self) -> None:
        """Nobody waits for ever: when nothing breaks any more, all that live come to an end."""
        if not hasattr(self, "peers"):
            return
        for _ in range(100):
            if not self.busy() and not self.working():
                break
            for peer in self.busy():
                if not peer.has_exchanged and not peer.ended:
                    self.exchange(peer, [PARTS if each.is_alive else 0 for each in self.peers])
            for peer in self.busy():
                if not peer.ended and peer.link is None and self.candidate(peer) is not peer:
                    self.follow(peer)
            for peer in self.busy():
                while peer.news and not peer.ended:
                    self.hear(peer)
                if not peer.ended and peer.is_late and peer.link is not None:
                    self.fetch(peer)
            for peer in self.working():
                self.end_attempt(peer, {} if peer.is_called_off else None)
            for peer in self.busy():
                if self.candidate(peer) is peer and peer.grace:
                    peer.grace = False
                    self.emit(peer, GraceOver())
                elif self.candidate(peer) is peer:
                    self.ask_absent(peer, is_late=True)
                    if busy := peer.state.busy:
                        self.emit(peer, PatienceOver(busy))
        if self.busy() or self.working():
            pytest.fail("members wait for ever:\n" + "\n".join(map(str, self.peers)))
        self.all_have_the_same_averages()


class WithQuorum(EndOfRound):
    quorum = 2


class WithoutPassingOn(EndOfRound):
    passes_on = False


EVENTS = settings(max_examples=80, derandomize=True, stateful_step_count=40, deadline=None)
TestEndOfRound = EndOfRound.TestCase
TestEndOfRound.settings = EVENTS
TestWithQuorum = WithQuorum.TestCase
TestWithQuorum.settings = EVENTS
TestWithoutPassingOn = WithoutPassingOn.TestCase
TestWithoutPassingOn.settings = EVENTS


def linked(state: RoundState, index: int) -> MemberLink:
    link = MemberLink(1.0)
    on(state, Linked(index, link))
    return link


def test_all_reports_commit_the_round() -> None:
    state = state_of(3)
    on(state, Coordinate(waits=True))
    on(state, Exchanged([PARTS] * 3))
    first, second = linked(state, 1), linked(state, 2)
    assert on(state, Reported(1, first, [PARTS] * 3)) == []
    [commit] = on(state, Reported(2, second, [PARTS] * 3))
    assert isinstance(commit, CommitRound)
    assert not commit.keeps


def test_gaps_are_filled_before_the_commit() -> None:
    state = state_of(3)
    on(state, Coordinate(waits=True))
    on(state, Exchanged([PARTS, PARTS, 1]))
    link = linked(state, 1)
    on(state, Reported(1, link, [PARTS, PARTS, 2]))
    *_, attempt = on(state, Lost(2, GONE))
    assert isinstance(attempt, Attempt)
    assert attempt.plan.sources == {(2, 1): 1}
    assert attempt.plan.again == [(2, 2)]
    on(state, AttemptEnded(True, [PARTS] * 3))
    [*_, commit] = on(state, Reported(1, link, [PARTS] * 3))
    assert isinstance(commit, CommitRound)
    assert commit.keeps, "the lost member may come back"


@pytest.mark.parametrize("may_reduce", [True, False])
def test_parts_that_nobody_holds_are_reduced_again(may_reduce: bool) -> None:
    plan = make_plan([PARTS, PARTS], {0: [PARTS, 0], 1: [PARTS, 0]}, 0, may_reduce=may_reduce)
    assert plan.again == ([(1, index) for index in range(PARTS)] if may_reduce else [])
    assert plan.missing == {0: [(1, 0, PARTS)], 1: [(1, 0, PARTS)]}


def test_a_coordinator_that_resigned_says_so_again() -> None:
    """The connection of a member may break before it is told."""
    state = state_of(4, quorum=2)
    on(state, Coordinate(waits=True))
    for index in (1, 2):
        on(state, HasDelivered(linked(state, index)))
    assert Resign() in on(state, GraceOver())
    link = MemberLink(1.0)
    [told] = [action for action in on(state, Linked(1, link)) if isinstance(action, TellMembers)]
    assert told == TellMembers([link], Resigns())


def test_a_member_that_links_late_hears_of_earlier_deaths() -> None:
    """It may have followed another coordinator, which is dead, and would wait for each dead member."""
    state = state_of(4)
    on(state, Coordinate(waits=True))
    linked(state, 1)
    assert TellMembers([*state.punctual.values()], MembersLost({3: GONE.cause})) in on(state, Lost(3, GONE))
    link = MemberLink(1.0)
    assert on(state, Linked(2, link)) == [TellMembers([link], MembersLost({3: GONE.cause}))]


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_member_that_returns_after_a_recovery_is_late(passes_on: bool) -> None:
    """It may hold other averages of the parts that were reduced again without it."""
    state = state_of(4, passes_on=passes_on)
    on(state, Coordinate(waits=True))
    on(state, Exchanged([PARTS, PARTS, PARTS, 0]))
    links = {index: linked(state, index) for index in (1, 2, 3)}
    on(state, Lost(3, GONE))
    for index in (2, 3):
        on(state, LinkLost(index, links[index], GONE))
    *_, attempt = on(state, Reported(1, links[1], [PARTS, PARTS, PARTS, 0]))
    assert isinstance(attempt, Attempt)
    assert state.is_over_for(state.members[2]) is not passes_on
    link = MemberLink(1.0)
    actions = on(state, Linked(2, link))
    assert TellMembers([link], Late()) in actions
    assert 2 not in state.punctual
