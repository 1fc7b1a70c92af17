"""Matchmaking: finding a group for the next round.

Each peer that looks for a group declares in the DHT the time by which it promises to start. Peers are ordered by
(promised time, peer id), and the smallest one leads. Each peer asks the smallest one that it knows to lead it, and
answers others while it waits itself:

- While it asks a leader, it accepts followers. Once it is accepted, it redirects them to its leader.
- While it follows, it redirects peers that ask it to its leader.

A leader starts when the group is complete (it has the target size, or all members that the leader expects), or at
its promised time if it has enough members. It waits a little longer for followers whose connection has just broken. A
follower that has not returned by then is still a member, and learns of the group when it returns.

Records spread with a delay. So a peer that sees others but no smaller one also invites them: it calls those that may
follow it, and they join on the same call. So two peers meet even if only one of them sees the other, or only one can
connect to the other. A peer that declines names the leader that it follows instead, so that groups which form at the
same time find each other.

:class:`~.search.GroupSearch` decides what to do; it has no network and no clock. The shell in this module performs its
actions and reports the results to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from shoal.averaging.control import Absence, AveragingMode, GroupInfo, StepControl
from shoal.averaging.groups.group import bytes_of_member, describe_group, learn, read_group, record_of
from shoal.averaging.groups.keys import GroupKeyManager
from shoal.averaging.groups.memory import TOO_SLOW, FormerMembers, Refusals, RefusedPeer
from shoal.averaging.groups.search import (
    Accepts,
    Action,
    Adopt,
    Answers,
    Ask,
    AskFailure,
    Breaks,
    Declare,
    Event,
    Fails,
    Follower,
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
    Waste,
)
from shoal.averaging.groups.settings import MatchmakingSettings, Trust, difference_of
from shoal.averaging.messages import (
    CALL_FAILURES,
    Code,
    GroupStart,
    Invitation,
    InvitationReply,
    JoinReply,
    JoinRequest,
    Leave,
)
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, counted, one_line, quoted
from shoal.base.tasks import TaskSet, cancel_and_wait, first_completed
from shoal.dht.validation import SHORT_LIFETIME_SECONDS
from shoal.errors import (
    AllreduceException,
    InterruptedDialError,
    P2PHandlerError,
    ProtocolError,
    ShoalError,
    StreamClosedError,
)
from shoal.net.transport import MOST
from shoal.p2p import P2P, Call, PeerID, StubBase

logger = logging.getLogger(__name__)

# Seconds between two lookups in the table. The pause grows from the first to the second value (chosen): most peers
# start at the same time, so early lookups find the most.
FIRST_LOOKUP_PAUSE, MAX_LOOKUP_PAUSE = 0.1, 1.0
# When this peer gives up, it waits this long for its goodbye to reach the leader and for the last answer. Chosen: a few
# round trips of a slow line.
GOODBYE_SECONDS = 1.0
# Seconds that a member of the group has to end the call of an obsolete invitation (chosen: a few round trips).
MEMBER_PATIENCE = 1.0
# The most lookups in flight (chosen). With several, a lookup that waits for slow nodes does not hold up the next one.
MAX_LOOKUPS = 3
# The least seconds between two looks at the clock (chosen), so that a moment that has just passed causes no busy loop.
SHORTEST_PAUSE = 0.001

GetStub = Callable[[PeerID], StubBase]


@dataclass(frozen=True)
class StartedGroup:
    """A group that this peer has started, and the requests of its followers."""

    start: GroupStart
    requests: dict[PeerID, JoinRequest]

    def is_for(self, peer: PeerID, request: JoinRequest) -> bool:
        """Whether this request made the peer a member. A later request belongs to a new search."""
        known = self.requests.get(peer)
        return known is not None and (known.expiration, known.search) == (request.expiration, request.search)


@dataclass
class HeldOffer:
    """The call of a peer that offers to lead this one. It is held until this peer has decided."""

    call: Call
    outcome: asyncio.Future[tuple[PeerID, float] | None]
    """The leader that this peer follows instead, and when that one starts; ``None``: no leader to name."""
    is_used: bool = False

    def close(self, better: tuple[PeerID, float] | None) -> None:
        """Release the call, with the leader to name instead."""
        if not self.outcome.done():
            self.outcome.set_result(better)

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Call]:
        """Use the call to ask to be led. Leaving the block before both sides have ended cuts the connection."""
        self.is_used = True
        try:
            yield self.call
        finally:
            if not self.call.clean:
                self.call.connection.abort()
            self.close(None)


@dataclass
class Surroundings:
    """What all searches of one averager share."""

    p2p: P2P
    keys: GroupKeyManager
    get_stub: GetStub
    """Makes a stub of the averager protocol."""
    trust: Trust
    members: FormerMembers
    background: TaskSet
    """Withdrawals and invitations, which may outlive a search."""
    warn_seldom: Seldom


class OpenCalls:
    """The calls of one search that are not over."""

    def __init__(self) -> None:
        self.asking: asyncio.Task[None] | None = None
        """The call to the current candidate."""
        self.followers: dict[PeerID, asyncio.Queue[JoinReply | Exception]] = {}
        """By follower: the answers that its call has to send, or the error that broke it."""
        self.offers: dict[PeerID, HeldOffer] = {}
        self.invitations: dict[PeerID, asyncio.Task[None]] = {}


class SearchShell:
    """Performs the actions of one search, and reports the results to it.

    Args:
        search: decides what to do.
        around: what all searches of this averager share.
        control: the step that wants a group.
        number: counts this peer's searches.
    """

    def __init__(self, search: GroupSearch, around: Surroundings, control: StepControl, number: int) -> None:
        self.search, self._around, self.control, self.number = search, around, control, number
        self.group: asyncio.Future[GroupInfo] = asyncio.get_running_loop().create_future()
        """Done when there is a group, or when the search broke or was cancelled. :meth:`run` notices that a turn of the
        loop later. A group that starts in between is not this peer's."""
        self.started: StartedGroup | None = None
        self.left: list[bytes] = []
        """The ids of groups that count this peer as a member, although it does not take part."""
        self.declared = asyncio.Event()
        """Set when the table lists this peer."""
        self.declared_until = -math.inf
        """The latest promised time that this peer has published in the table."""
        self._redeclare = asyncio.Event()
        self._tasks, self._calls = TaskSet(), OpenCalls()
        self._timer: asyncio.TimerHandle | None = None

    # --- events and actions -------------------------------------------------------------------------------------------

    def on(self, event: Event) -> None:
        """Pass an event to the search, and perform the actions that it returns."""
        self.search.terms, now = Terms.of(self.control), get_dht_time()
        for action in self.search.on(event, now):
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
        self._timer, moment = None, self.search.next_moment(now)
        if moment is not None:
            pause = max(SHORTEST_PAUSE, moment - now)
            self._timer = asyncio.get_running_loop().call_later(pause, self._tick)

    def _tick(self) -> None:
        try:
            self.on(Tick())
        except Exception as e:
            self._break(e)

    def _perform(self, action: Action) -> None:
        match action:
            case Ask(peer, on_offer):
                offer = self._calls.offers.get(peer) if on_offer else None
                self._calls.asking = self._start(self._ask(peer, offer))
            case StopAsking():
                if self._calls.asking is not None:
                    self._calls.asking.cancel()
            case Invite(peer):
                self._calls.invitations[peer] = self._around.background.start(self._invite(peer))
            case Release(peer, leader, promised):
                if (offer := self._calls.offers.get(peer)) is not None:
                    offer.close(None if leader is None else (leader, promised))
            case Reply(peer):
                self._calls.followers[peer].put_nowait(self._message_of(action))
            case Declare():
                self._redeclare.set()
            case Judge(leader, seconds, started, in_vain):
                self._around.p2p.behaviour.note_lead(leader, seconds, started=started, in_vain=in_vain)
            case Waste(leader, seconds):
                self._around.trust.note_waste(leader, seconds)
            case Start(followers):
                self.start_group(followers)
            case Adopt(group):
                self._adopt(group)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.start(work)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        """End the search with an error if a task that should never fail has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self.group.done():
            self.group.set_exception(error)

    # --- the life of a search -----------------------------------------------------------------------------------------

    async def run(self) -> GroupInfo:
        """Search until there is a group."""
        self._start(self._discover())
        self._start(self._watch_terms())
        if self.search.settings.leads:
            self._start(self._declare())
        try:
            self.on(Seen(self._around.members.take_invitations(self.search.key, get_dht_time())))
            return await self.group
        finally:
            self._end()
            await self._tasks.cancel()

    def _end(self) -> None:
        """Answer all waiting calls. No peer may join from now on."""
        for action in self.search.end():
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
        has_group = self.group.done() and not self.group.cancelled() and self.group.exception() is None
        members = self.group.result().peer_ids if has_group else ()
        end_invitations(self._calls.invitations, members)

    async def _watch_terms(self) -> None:
        while True:
            await self.control.changed.wait()
            self.control.changed.clear()
            self.on(Tick())

    async def _declare(self) -> None:
        while True:
            self.declared_until = max(self.declared_until, self.search.promise)
            await self._around.keys.declare_averager(self.search.key, self._around.p2p.peer_id, self.declared_until)
            self.declared.set()
            await self._redeclare.wait()
            self._redeclare.clear()

    async def _discover(self) -> None:
        """Look up other peers. Early lookups are frequent and ask only the few nodes that should hold the records."""
        lookups: dict[asyncio.Task[None], None] = {}
        search, pause = self.search, 0.0
        has_declared = not search.settings.leads
        try:
            while True:
                if has_declared:
                    await asyncio.sleep(
                        pause * (0.75 + 0.5 * self._around.p2p.rng.random())
                    )  # peers must not look in step
                else:
                    # A peer declares itself before it looks. So of two peers at least one sees the other.
                    await first_completed(self.declared.wait(), timeout=max(pause, FIRST_LOOKUP_PAUSE))
                    has_declared = self.declared.is_set()
                is_free = search.asking is None or not search.asking.follows
                if is_free and len(lookups) < MAX_LOOKUPS:
                    lookup = asyncio.ensure_future(self._look(quickly=pause < MAX_LOOKUP_PAUSE))
                    lookups[lookup] = None
                    await asyncio.wait([lookup], timeout=MAX_LOOKUP_PAUSE)
                for done in [lookup for lookup in lookups if lookup.done()]:
                    del lookups[done]
                    done.result()
                now = get_dht_time()
                if not self._around.keys.group_bits:
                    recent = list(self._around.members)
                    self.on(Remembered(self._around.p2p.rng.sample(recent, len(recent))))
                pause = min(max(2 * pause, FIRST_LOOKUP_PAUSE), search.longest_pause(MAX_LOOKUP_PAUSE, now))
        finally:
            await cancel_and_wait(*lookups)

    async def _look(self, quickly: bool) -> None:
        search, key = self.search, self.search.key
        gone: list[tuple[PeerID, float]] = []
        found = await self._around.keys.get_averagers(key, True, quickly or search.sees_group(get_dht_time()), gone)
        self.on(Seen(found, gone))
        other = key if quickly else await self._around.keys.find_more(key, len(found))
        if other != key and search.may_move(other):
            search.key = other
            self._redeclare.set()

    # --- following ----------------------------------------------------------------------------------------------------

    def _request(self) -> JoinRequest:
        control, own = self.control, self.search.settings
        return JoinRequest(
            group_key=self.search.key,
            settings=own.agreed,
            expiration=self.search.promise if own.leads else min(control.deadline, MOST),
            mode=int(own.mode),
            gathered=control.data_for_gather,
            bandwidth=own.bandwidth,
            reach=int(own.reach),
            relay_rate=own.relay_rate,
            expected_group_size=control.expected_group_size,
            search=self.number,
        )

    async def _ask(self, leader: PeerID, offer: HeldOffer | None) -> None:
        """Ask a peer to lead this one. If it has offered to, ask on the call of its offer."""
        asking, reply = self.search.asking, None
        assert asking is not None
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.search.settings.request_timeout):
                    way = self._around.get_stub(leader).rpc_join_group() if offer is None else offer.taken()
                    call = await stack.enter_async_context(way)
                    request = self._request()
                    await call.send(request if offer is None else InvitationReply(request=request))
                    self.on(Sent(leader))
                    reply = await receive_answer(call)
                if reply.code == Code.ACCEPTED:
                    self.on(Accepts(leader, reply.expiration))
                    assert asking.starts_by is not None
                    reply = await self._wait_for_start(call, asking.starts_by)
                # If the leader has left already, its answer still holds.
                with suppress(StreamClosedError):
                    await call.send_end()
        except asyncio.CancelledError:
            if reply is not None and reply.group is not None:
                self.left.append(reply.group.group_id)
            raise
        except (P2PHandlerError, ProtocolError) as e:
            logger.debug("asked %s to lead: %r", leader, e)
            self.on(Fails(leader, AskFailure.NONSENSE))
        except CALL_FAILURES as e:
            logger.debug("asked %s to lead: %r", leader, e)
            self._note_uncalled(leader, e, None if asking.is_guess else asking.promised)
            self.on(Fails(leader, _failure_of(e)))
        else:
            self._take_answer(leader, reply)

    async def _wait_for_start(self, call: Call, starts_by: float) -> JoinReply:
        """Wait for the leader's last answer. If this peer gives up meanwhile, it tells the leader."""
        # Cancelling a reader closes its connection, which would prevent the goodbye. So a task of its own reads.
        last_word = asyncio.ensure_future(receive_answer(call))
        try:
            patience = max(0.0, starts_by - get_dht_time()) + self.search.settings.request_timeout
            async with asyncio.timeout(patience):
                return await asyncio.shield(last_word)
        except asyncio.CancelledError:
            with suppress(*CALL_FAILURES):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await call.send(Leave(), end=True)
                    await asyncio.wait([last_word])
                    # If the group has just started, its members must not wait for this peer.
                    if (group := last_word.result().group) is not None:
                        self.left.append(group.group_id)
            raise
        finally:
            # An await could raise a pending cancellation and lose the answer. So there is none if the task is done.
            if not last_word.done():
                await cancel_and_wait(last_word)

    def _take_answer(self, leader: PeerID, reply: JoinReply) -> None:
        around, words, group, named = self._around, one_line(reply.text), None, None
        try:
            if reply.code == Code.GROUP_STARTS and reply.group is not None:
                group = read_group(around.p2p, reply.group, self.search.settings.total_size, around.trust, leader)
            elif reply.better_leader is not None:
                named = learn(around.p2p, reply.better_leader)
        except ProtocolError as e:
            around.warn_seldom("peer %s sent an invalid answer: %s", leader, one_line(str(e)), about=leader)
            if reply.group is None:
                self.on(Fails(leader, AskFailure.NONSENSE))
                return
            around.p2p.metrics.members_untrue += 1
            self.left.append(reply.group.group_id)
            self.on(Fails(leader, AskFailure.UNTRUE))
            return
        if reply.code in (Code.SETTINGS_DIFFER, Code.REFUSED):
            around.warn_seldom("peer %s refuses to average with this one: %s", leader, words, about=leader)
        logger.debug("%s answered %s %s", leader, reply.code, quoted(reply.text))
        self.on(Answers(leader, reply.code, words, group, named, reply.expiration))

    def _note_uncalled(self, peer: PeerID, error: Exception, promised: float | None) -> None:
        """A call to a peer has failed. If it had promised to be there, ``promised`` is the DHT time of that."""
        if promised is not None:
            company = self.search.key.partition(".")[0]
            self._around.p2p.note_uncalled(peer, error, company=company, sign_of_life=promised)
        # One that ends a call in the middle may be alive. If it is not, the next call is refused.
        if peer in (self.search.terms.awaited or ()) and not isinstance(error, StreamClosedError):
            self.control.on_loss()

    # --- offers of others ---------------------------------------------------------------------------------------------

    async def hold_offer(self, call: Call, invitation: Invitation) -> None:
        """Hold the call of a peer that offers to lead, until this peer joins on it or follows another leader."""
        peer, offers = call.remote, self._calls.offers
        if (previous := offers.get(peer)) is not None:
            if previous.is_used:
                return
            previous.close(None)
        offer = offers[peer] = HeldOffer(call, asyncio.get_running_loop().create_future())
        try:
            self.on(Offers(peer, invitation.expiration))
            better = await offer.outcome
            if better is not None:
                leader, expiration = better
                reply = InvitationReply(better_leader=record_of(self._around.p2p, leader), expiration=expiration)
                await call.send(reply, end=True)
        finally:
            if offers.get(peer) is offer:
                del offers[peer]
                self.on(OfferEnds(peer))

    # --- leading ------------------------------------------------------------------------------------------------------

    async def _invite(self, peer: PeerID) -> None:
        """Invite a peer, and let it join on the same call."""
        search = self.search
        try:
            async with self._around.get_stub(peer).rpc_invite() as call:
                await call.send(Invitation(group_key=search.key, expiration=search.promise), end=False)
                reply = await call.receive(InvitationReply)
                named = reply.better_leader if reply is not None else None
                leader = None if named is None else learn(self._around.p2p, named)
                self.on(InvitationEnds(peer, leader, 0.0 if reply is None else reply.expiration))
                if reply is not None and reply.request is not None:
                    await self._let_in(call, reply.request)
                else:
                    await call.send_end()
        except CALL_FAILURES as e:
            logger.debug("could not invite %s: %r", peer, e)
            self._note_uncalled(peer, e, search.looking().get(peer))
            self.on(InvitationEnds(peer, arrived=False))

    async def _let_in(self, call: Call, request: JoinRequest) -> None:
        """Answer an invited peer that joins. It leaves when its connection ends, like a peer that made the call."""
        me = asyncio.current_task()
        assert me is not None
        # The server cancels the handler of an incoming call when the connection closes. This call is our own, so this
        # method does it.
        call.connection.stream.on_closed(me.cancel)
        try:
            await self.answer_join(call, request, call.remote)
            await call.drain()
        finally:
            call.connection.stream.on_closed(None)

    async def answer_join(self, call: Call, request: JoinRequest, remote: PeerID) -> None:
        """Answer a peer that asks this one to lead it, and tell it the outcome later."""
        # A follower whose connection broke asks again: the group has started, but the news did not reach it.
        if self.started is not None and self.started.is_for(remote, request):
            await call.send(JoinReply(code=Code.GROUP_STARTS, group=self.started.start), end=True)
            return
        nbytes = bytes_of_member(self._around.p2p, remote, request)
        refusal = self._refusal_of(remote, request, nbytes)
        if refusal is None and request.mode != AveragingMode.AUX:
            admitted = await self._around.trust.admits(remote)
            refusal = self._refusal_of(remote, request, nbytes)  # the search may have ended meanwhile
            refusal = refusal if admitted else Reply(remote, Code.OTHER_MODEL)
        if refusal is not None:
            await call.send(self._message_of(refusal), end=True)
            return
        answers = self._calls.followers[remote] = asyncio.Queue()
        news = asyncio.ensure_future(self._hear(call, remote, answers))
        try:
            self.on(Joins(remote, request, nbytes))
            is_last = False
            while not is_last:
                answer = await answers.get()
                if isinstance(answer, Exception):
                    raise answer
                is_last = answer.code != Code.ACCEPTED
                await call.send(answer, end=is_last)
            await first_completed(asyncio.shield(news), timeout=self.search.settings.request_timeout)
        finally:  # a follower that leaves cancels this handler
            await cancel_and_wait(news)
            if self._calls.followers.get(remote) is answers:
                del self._calls.followers[remote]
                self.on(Breaks(remote))

    async def _hear(self, call: Call, follower: PeerID, answers: asyncio.Queue[JoinReply | Exception]) -> None:
        """Wait until a follower leaves, or ends its side of the call."""
        try:
            if await call.receive(Leave) is not None and self._calls.followers.get(follower) is answers:
                self.on(Leaves(follower))
        except CALL_FAILURES as e:
            answers.put_nowait(e)

    def _refusal_of(self, peer: PeerID, request: JoinRequest, nbytes: int) -> Reply | None:
        refusal = self.search.refusal_of(peer, request, nbytes)
        if refusal is None and self.group.done():
            refusal = Reply(peer, Code.NOT_LOOKING_FOR_GROUP)
        if refusal is not None and refusal.code is Code.SETTINGS_DIFFER:
            seen_here = difference_of(request.settings, self.search.settings.agreed)
            self._around.warn_seldom("peer %s cannot average with this one: %s", peer, seen_here, about=peer)
        if refusal is not None and refusal.code is Code.REFUSED:
            self.on(Seen([(peer, request.expiration)]))  # it counts as present, so the group does not wait for it
        return refusal

    def _message_of(self, reply: Reply) -> JoinReply:
        leader = None if reply.leader is None else record_of(self._around.p2p, reply.leader)
        return JoinReply(code=reply.code, text=reply.words, expiration=reply.promised, better_leader=leader)

    def start_group(self, followers: Mapping[PeerID, Follower]) -> None:
        """Start the group as its leader, and announce it to all followers, including those that may still return."""
        if self.group.done():
            for peer in followers:
                if peer in self._calls.followers:
                    self._perform(Reply(peer, Code.GROUP_DISBANDED))
            return
        start = describe_group(self._around.p2p, self.search.settings, followers, self.control.data_for_gather)
        for peer in followers:
            self.tell_follower(peer, start)
        self.started = StartedGroup(start, {peer: each.request for peer, each in followers.items()})
        around, total_size = self._around, self.search.settings.total_size
        self._adopt(read_group(around.p2p, start, total_size, around.trust))

    def tell_follower(self, peer: PeerID, start: GroupStart) -> None:
        """Tell a follower that the group starts, unless its connection is broken."""
        if (answers := self._calls.followers.get(peer)) is not None:
            answers.put_nowait(JoinReply(code=Code.GROUP_STARTS, group=start))

    def _adopt(self, group: GroupInfo) -> None:
        if self.group.done():
            self.left.append(group.group_id)
            return
        causes = self.search.absences(group.peer_ids, get_dht_time())
        self.group.set_result(replace(group, absent={peer: cause.absence for peer, cause in causes.items()}))


def end_invitations(invitations: Mapping[PeerID, asyncio.Task[None]], members: Collection[PeerID]) -> None:
    """End the calls of obsolete invitations.

    Members of the group end these calls themselves when their searches end. They get a moment to do so, because cutting
    a call cuts its connection, and the round would need a new one.
    """
    for peer, task in invitations.items():
        if peer in members:
            asyncio.get_running_loop().call_later(MEMBER_PATIENCE, task.cancel)
        else:
            task.cancel()


def _failure_of(error: Exception) -> AskFailure:
    if isinstance(error, TimeoutError):
        return AskFailure.SILENT
    return AskFailure.BROKEN if isinstance(error, (StreamClosedError, InterruptedDialError)) else AskFailure.UNREACHABLE


async def receive_answer(call: Call) -> JoinReply:
    """Wait for the next answer of a leader.

    Raises:
        ProtocolError: the leader has ended the call without one.
    """
    reply = await call.receive(JoinReply)
    if reply is None:
        raise ProtocolError("the leader ended without an answer")
    return reply


class Matchmaking:
    """Looks for groups on behalf of one averager, and answers peers that ask it to lead.

    Args:
        p2p: this peer.
        keys: publishes and finds averagers in the table.
        settings: how this averager looks for groups.
        get_stub: makes a stub of the averager protocol.
        trust: how far this peer trusts others.
        leave_group: tells the members of a group that this peer does not take part.
    """

    def __init__(
        self,
        p2p: P2P,
        keys: GroupKeyManager,
        settings: MatchmakingSettings,
        get_stub: GetStub,
        trust: Trust | None = None,
        leave_group: Callable[[bytes], None] = lambda group_id: None,
    ) -> None:
        self.keys, self.settings, self._leave_group = keys, settings, leave_group
        self.refusals, self.former_members, self.background = Refusals(), FormerMembers(), TaskSet()
        known = self.former_members, self.background
        self._around = Surroundings(p2p, keys, get_stub, trust or Trust(), *known, Seldom(logger.warning))
        self._one_at_a_time = asyncio.Lock()
        self.current: SearchShell | None = None
        """The search in progress."""
        self._started: StartedGroup | None = None
        self._numbers = itertools.count(1)
        # Expiration of this peer's latest withdrawal record.
        self._withdrawn_until = -math.inf
        self._latest: GroupSearch | None = None

    def believe(self, trust: Trust) -> None:
        """Use this trust from the next search on."""
        self._around.trust = trust

    async def look_for_group(self, control: StepControl) -> GroupInfo:
        """Find a group for a step.

        Raises:
            AllreduceException: no group was found before the step's deadline.
        """
        try:
            async with asyncio.timeout(control.get_timeout()), self._one_at_a_time:
                group = await self._run_search(control)
        except TimeoutError:
            raise AllreduceException(self.explain_failure()) from None
        self.keys.update_key_on_group_assembled(group)
        self._count(group.absent)
        return group

    async def _run_search(self, control: StepControl) -> GroupInfo:
        await control.wait_until_near(SHORT_LIFETIME_SECONDS)  # others ignore records that live longer
        now = get_dht_time()
        self.current = shell = self.begin(control, now)
        self._latest = shell.search
        try:
            return await shell.run()
        except asyncio.CancelledError:
            # If the group has just started, its members must not wait for this peer.
            if shell.group.done() and not shell.group.cancelled():
                shell.left.append(shell.group.result().group_id)
            raise
        finally:
            self.current, self._started = None, shell.started or self._started
            for group_id in shell.left:
                self._leave_group(group_id)
            if shell.search.settings.leads and shell.declared.is_set():
                self._withdrawn_until = math.nextafter(shell.declared_until, math.inf)
                self.background.start(self._withdraw(shell.search.key, shell.declared_until))

    def begin(self, control: StepControl, now: float) -> SearchShell:
        """Begin a search for a step."""
        around, terms = self._around, Terms.of(control)
        settings, key = self.settings.at_this_step(around.p2p), self.keys.draw_key(around.trust.depth())
        # The table keeps the record with the latest expiration, so this one must outlive the last withdrawal.
        promise = max(
            terms.promise(now, settings.min_matchmaking_time), math.nextafter(self._withdrawn_until, math.inf)
        )
        scores = around.p2p.behaviour
        search = GroupSearch(around.p2p.peer_id, settings, around.trust, scores.may_lead, key, terms, promise, now)
        too_slow = dict.fromkeys(scores.find_too_slow(), RefusedPeer(TOO_SLOW))
        for peer, refusal in {**too_slow, **self.refusals.next_search()}.items():
            search.refuse(peer, refusal)
        return SearchShell(search, around, control, next(self._numbers))

    def explain_failure(self) -> str:
        """Why no group was found, with what is known about each other peer."""
        causes = {} if self._latest is None else self._latest.absences((), get_dht_time())
        detail = "".join(f"\n  {peer}: {cause.words or cause.absence.value}" for peer, cause in causes.items())
        least, key = counted(self.settings.min_group_size, "peer"), self.keys.current_key
        found = f"could not find a group of at least {least} under {key} in time"
        return f"{found}; other peers:{detail}" if detail else found

    def _count(self, absent: Mapping[PeerID, Absence]) -> None:
        for peer, absence in absent.items():
            self._around.p2p.metrics.peers_absent[absence.key] += 1
            logger.debug("peer %s is not in the group: it %s", peer, absence.value)

    async def _withdraw(self, key: str, declared_until: float) -> None:
        try:
            await self.keys.declare_averager(key, self._around.p2p.peer_id, declared_until, looking_for_group=False)
        except ShoalError as e:
            # The table may be closed already. This peer's record expires soon anyway.
            logger.debug("could not withdraw this peer's record from the table: %s", e)

    # --- what others call ---------------------------------------------------------------------------------------------

    async def answer_join(self, call: Call, request: JoinRequest, remote: PeerID) -> None:
        """Answer a peer that asks this one to lead it, and tell it the outcome later."""
        if self.current is not None:
            await self.current.answer_join(call, request, remote)
        elif self._started is not None and self._started.is_for(remote, request):
            await call.send(JoinReply(code=Code.GROUP_STARTS, group=self._started.start), end=True)
        else:
            code = Code.NOT_LOOKING_FOR_GROUP if self.settings.leads else Code.PROTOCOL_VIOLATION
            await call.send(JoinReply(code=code), end=True)

    async def answer_invitation(self, call: Call, invitation: Invitation) -> None:
        """Answer a peer that offers to lead. Its call is held until this peer joins on it or has decided otherwise."""
        current = self.current
        if current is None or current.search.is_over or invitation.group_key != current.search.key:
            self.former_members.note_invitation(call.remote, invitation)
        else:
            await current.hold_offer(call, invitation)

    async def close(self) -> None:
        """Finish background work, such as withdrawing from the DHT, within a second."""
        with suppress(TimeoutError):
            # A cancelled search starts its withdrawal when it ends, so the lock is awaited first.
            async with asyncio.timeout(1.0), self._one_at_a_time:
                await self.background.wait()
        await self.background.cancel()
