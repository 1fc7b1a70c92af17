"""Matchmaking: finding a group for the next round.

Each peer that looks for a group declares in the DHT the time at which it promises to start. Peers are ordered by
(promised time, peer id), and the smallest one leads. Each peer asks the smallest one that it knows to lead it. A peer
only ever follows a smaller one, so no ring of peers that wait for each other can form. Therefore a peer can answer
others while it waits itself:

- While it asks a leader, it accepts followers. Once it is accepted, it sends them on to its leader.
- While it follows, it tells peers that ask it where its leader is.

A leader starts when the group is complete (it has the target size, or as many members as any of them expects), or at
its promised time if it has enough members. It waits a little longer for followers whose connection has just broken. If
one has not returned by then, it is a member nevertheless, and learns of the group when it returns. Records spread with
a delay. So a peer that sees others but no smaller one also invites them, and two peers meet even if only one of them
sees the other (see :mod:`shoal.averaging.groups.leading`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

from shoal.averaging.control import AveragingMode, GroupInfo, StepControl
from shoal.averaging.groups.candidates import Follower, GroupSearch, MatchmakingSettings, Trust
from shoal.averaging.groups.former_members import FormerMembers
from shoal.averaging.groups.keys import GroupKeyManager
from shoal.averaging.groups.leading import (
    Invitations,
    Refusals,
    StartedGroup,
    describe_group,
    follower_of,
    is_full,
    learn,
    note_lead,
    read_group,
    receive_answer,
    record_of,
    take_back_lost,
)
from shoal.averaging.groups.settings import difference_of
from shoal.averaging.messages import (
    CALL_FAILURES,
    Code,
    Expectation,
    GroupStart,
    Invitation,
    InvitationReply,
    JoinReply,
    JoinRequest,
)
from shoal.base.clock import get_dht_time
from shoal.base.logs import Seldom, counted, one_line, quoted
from shoal.base.tasks import cancel_and_wait, first_completed
from shoal.dht.validation import SHORT_LIFETIME_SECONDS
from shoal.errors import AllreduceException, P2PHandlerError, ProtocolError, ShoalError, StreamClosedError
from shoal.p2p import P2P, Call, PeerID, StubBase

logger = logging.getLogger(__name__)

# Seconds between two looks at the table. The pauses grow: most peers begin at the same time, so early looks find most.
FIRST_LOOKUP_PAUSE = 0.1
MAX_LOOKUP_PAUSE = 1.0
# When this peer gives up, it waits so long for its goodbye to reach the leader and for the leader's last answer.
GOODBYE_SECONDS = 1.0
# The most lookups at the same time. With several, a lookup that waits for slow nodes does not hold up the next one.
MAX_LOOKUPS = 3


class Matchmaking:
    """Looks for groups on behalf of one averager, and answers peers that ask it to lead."""

    def __init__(
        self,
        p2p: P2P,
        keys: GroupKeyManager,
        settings: MatchmakingSettings,
        get_stub: Callable[[PeerID], StubBase],
        trust: Trust | None = None,
        leave_group: Callable[[bytes], None] = lambda group_id: None,
    ) -> None:
        self.p2p, self.keys, self.settings = p2p, keys, settings
        self._get_stub, self._trust, self._leave_group = get_stub, trust or Trust(), leave_group
        self.refusals, self.former_members = Refusals(), FormerMembers(p2p)
        self._invitations = Invitations(p2p, get_stub, self.answer_join)
        self._one_at_a_time = asyncio.Lock()
        self.search: GroupSearch | None = None
        """The search in progress."""
        self._started: StartedGroup | None = None
        self._numbers = itertools.count(1)
        # Expiration of the latest record that withdraws this peer.
        self._withdrawn_until = -math.inf
        self.background: dict[asyncio.Task[Any], None] = {}
        """Tasks for which nobody waits. A dictionary keeps their order, so that simulations can be repeated."""
        self._warn_seldom = Seldom(logger.warning)
        self._last_refusals: dict[str, str] = {}

    # --- looking ------------------------------------------------------------------------------------------------------

    async def look_for_group(self, control: StepControl) -> GroupInfo:
        """Find a group for a step.

        Raises:
            AllreduceException: no group was found before the step's deadline.
        """
        try:
            async with asyncio.timeout(control.get_timeout()), self._one_at_a_time:
                return await self._run_search(control)
        except TimeoutError:
            raise AllreduceException(self.explain_failure()) from None

    async def _run_search(self, control: StepControl) -> GroupInfo:
        await control.wait_until_near(SHORT_LIFETIME_SECONDS)  # others ignore records that live longer
        search = GroupSearch(
            *(self.p2p.peer_id, self.settings.at_this_step(self.p2p), control, self.keys.draw_key(self._trust.depth())),
            self._promised_time(control),
            asyncio.get_running_loop().create_future(),
            next(self._numbers),
            refused={**dict.fromkeys(self.p2p.behaviour.find_too_slow(), True), **self.refusals.next_search()},
            may_lead=self.p2p.behaviour.may_lead,
            trust=self._trust,
        )
        self.search, self._last_refusals = search, search.refusals
        self.former_members.tell_invitations(search)
        try:
            return await self._work_on(search)
        except asyncio.CancelledError:
            # The group may have started at this very moment: its members must not wait for this peer.
            if search.group.done():
                self._leave_group(search.group.result().group_id)
            raise
        finally:
            self._invitations.end(search)
            self.send_followers_away(search, None)
            if search.settings.leads and search.declared.is_set():
                self._withdrawn_until = math.nextafter(search.declared_until, math.inf)
                self._in_background(self._withdraw(search))

    async def _work_on(self, search: GroupSearch) -> GroupInfo:
        tasks = [asyncio.ensure_future(work) for work in (self._discover(search), self._lead_or_follow(search))]
        if search.settings.leads:
            tasks.append(asyncio.ensure_future(self._declare(search)))
        try:
            waited: list[asyncio.Future[Any]] = [search.group, *tasks]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not search.group.done():
                    task.result()  # raises what broke the search
            return await search.group
        finally:
            # From now on nobody may join.
            self.search = None
            await cancel_and_wait(*tasks)

    def explain_failure(self) -> str:
        refusals = "".join(f"\n  {peer}: {reason}" for peer, reason in self._last_refusals.items())
        detail = f"; peers that refused:{refusals}" if refusals else ""
        least, key = counted(self.settings.min_group_size, "peer"), self.keys.current_key
        return f"could not find a group of at least {least} under {key} in time{detail}"

    def _promised_time(self, control: StepControl) -> float:
        now = get_dht_time()
        promised = max(control.scheduled_time, now + self.settings.min_matchmaking_time)
        promised = min(promised, control.deadline, now + SHORT_LIFETIME_SECONDS)
        # The table keeps the record with the latest expiration, so this one must outlive the last withdrawal.
        return max(promised, math.nextafter(self._withdrawn_until, math.inf))

    async def _declare(self, search: GroupSearch) -> None:
        while True:
            search.declared_until = max(search.declared_until, search.expiration)
            await self.keys.declare_averager(search.key, self.p2p.peer_id, search.declared_until)
            search.declared.set()
            await search.redeclare.wait()
            search.redeclare.clear()

    async def _withdraw(self, search: GroupSearch) -> None:
        try:
            record = search.key, self.p2p.peer_id, search.declared_until
            await self.keys.declare_averager(*record, looking_for_group=False)
        except ShoalError as e:
            # The table may be closed already. Its record of this peer expires soon anyway.
            logger.debug("could not tell the table that this peer does not look for a group any more: %s", e)

    async def _discover(self, search: GroupSearch) -> None:
        """Look up other peers. The first looks are frequent and ask only the few nodes that should hold the records."""
        lookups: dict[asyncio.Task[None], None] = {}
        has_declared, pause = not search.settings.leads, 0.0
        try:
            while True:
                if has_declared:
                    await asyncio.sleep(pause * (0.75 + 0.5 * self.p2p.rng.random()))  # peers must not look in step
                else:
                    # A peer declares itself before it looks. So of two peers at least one sees the other.
                    await first_completed(search.declared.wait(), timeout=max(pause, FIRST_LOOKUP_PAUSE))
                    has_declared = search.declared.is_set()
                if search.leader is None and len(lookups) < MAX_LOOKUPS:
                    lookup = asyncio.ensure_future(self._look(search, quickly=pause < MAX_LOOKUP_PAUSE))
                    lookups[lookup] = None
                    await asyncio.wait([lookup], timeout=MAX_LOOKUP_PAUSE)
                for done in [lookup for lookup in lookups if lookup.done()]:
                    del lookups[done]
                    done.result()
                if not self.keys.group_bits:
                    self.former_members.ask(search, self._invitations)
                pause = min(max(2 * pause, FIRST_LOOKUP_PAUSE), search.longest_pause(MAX_LOOKUP_PAUSE))
        finally:
            await cancel_and_wait(*lookups)

    async def _look(self, search: GroupSearch, quickly: bool) -> None:
        gone: list[tuple[PeerID, float]] = []
        found = await self.keys.get_averagers(search.key, True, quickly or search.sees_group(), gone)
        search.note_candidates(found, gone)
        self._invitations.invite_followers(search)
        search.move_to(search.key if quickly else await self.keys.find_more(search.key, len(found)))

    async def _lead_or_follow(self, search: GroupSearch) -> None:
        while not search.group.done():
            search.control.changed.clear()
            candidate = search.best_candidate()
            # The clock is read once for this pass. If its time came between two reads, this peer would send its
            # followers away instead of starting.
            now = get_dht_time()
            if self.may_start(search, now):
                self.start_group(search)
            elif candidate is not None:
                await self._ask_until_start(search, candidate)
            elif search.go_before_unfit_leaders():
                self._invitations.invite_followers(search)
            else:
                await self._wait_for_news(search, now)

    def may_start(self, search: GroupSearch, now: float) -> bool:
        """Whether this peer may start its group now, as the leader."""
        size = 1 + len(search.followers)
        if not search.settings.leads or size < self.settings.min_group_size:
            return False
        full = self.settings.target_group_size is not None and size >= self.settings.target_group_size
        is_time = not search.control.keep_open and now >= search.start_time()
        return full or search.is_complete() or is_time

    async def _wait_for_news(self, search: GroupSearch, now: float) -> None:
        # Too few peers came by the promised time, so this peer makes a new promise.
        if search.settings.leads and now >= search.start_time():
            self.send_followers_away(search, None)
            search.lost.clear()
            search.expiration = self._promised_time(search.control)
            search.redeclare.set()
        until = search.next_moment()
        timeout = None if until is None else max(0.001, until - get_dht_time())
        await first_completed(search.control.changed.wait(), timeout=timeout)

    # --- following ----------------------------------------------------------------------------------------------------

    async def _ask_until_start(self, search: GroupSearch, leader: PeerID) -> None:
        """Ask a leader; but as long as it has not accepted, stop when this peer may start a group itself."""
        ask = asyncio.ensure_future(self._ask(search, leader))
        try:
            while not ask.done():
                search.control.changed.clear()
                until_start = search.start_time() - get_dht_time() if search.settings.leads else MAX_LOOKUP_PAUSE
                await first_completed(
                    asyncio.shield(ask), search.control.changed.wait(), timeout=max(0.01, until_start)
                )
                is_open = search.leader is None and not ask.done()
                if is_open and (self.may_start(search, get_dht_time()) or search.has_shorter_way()):
                    return
                await self._tell_expectation(search)
            ask.result()
        finally:
            await cancel_and_wait(ask)

    async def _ask(self, search: GroupSearch, leader: PeerID) -> None:
        """Ask a peer to lead this one. Returns when there is a group, or when that peer will not lead this one now."""
        promised, is_known = search.candidates.get(leader, -math.inf), leader not in search.supposed
        search.asked = None
        offer = search.offers.get(leader)
        reply, accepted_at = None, None
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.settings.request_timeout):
                    way = self._get_stub(leader).rpc_join_group() if offer is None else offer.taken()
                    call = await stack.enter_async_context(way)
                    request = search.request()
                    await call.send(request if offer is None else InvitationReply(request=request))
                    search.asked, search.told_expectation = call, request.expected_group_size
                    reply = await receive_answer(call)
                if reply.code == Code.ACCEPTED:
                    start, accepted_at = search.note_acceptance(leader, reply.expiration), get_dht_time()
                    self.send_followers_away(search, leader)
                    await self._tell_expectation(search)
                    reply = await self._wait_for_start(call, start)
                    note_lead(self.p2p, search, leader, reply, start, accepted_at)
                search.asked = None
                # If the leader has left already, its answer still holds.
                with suppress(StreamClosedError):
                    await call.send_end()
        except asyncio.CancelledError:
            if reply is not None and reply.group is not None:
                self._leave_group(reply.group.group_id)
            raise
        except (P2PHandlerError, ProtocolError) as e:
            logger.debug("asked %s to lead: %r", leader, e)
            search.spent[leader] = promised
        except CALL_FAILURES as e:
            logger.debug("asked %s to lead: %r", leader, e)
            if accepted_at is not None and (lost := search.seconds_lost(accepted_at)) > 0:
                self.p2p.behaviour.note_lead(leader, lost, started=False)
            search.note_failure(leader, e)
            if is_known:
                self.p2p.note_uncalled(leader, e, company=search.key.partition(".")[0], sign_of_life=promised)
        else:
            try:
                self._take_answer(search, leader, promised, reply)
            except ProtocolError as e:
                self._warn_seldom(
                    "peer %s gave an answer that makes no sense: %s", leader, one_line(str(e)), about=leader
                )
        finally:
            search.leader = None
            search.note_end_of_lead(leader, reply, accepted_at)

    async def _wait_for_start(self, call: Call, expiration: float) -> JoinReply:
        """Wait for the leader's last answer. If this peer gives up meanwhile, it tells the leader."""
        # Cancelling a reader closes its connection, and then no goodbye could be sent on it. So a task reads.
        last_word = asyncio.ensure_future(receive_answer(call))
        try:
            async with asyncio.timeout(max(0.0, expiration - get_dht_time()) + self.settings.request_timeout):
                return await asyncio.shield(last_word)
        except asyncio.CancelledError:
            with suppress(*CALL_FAILURES):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await call.send(Expectation(leaves=True), end=True)
                    await asyncio.wait([last_word])
                    # If the group has started at this very moment, its members must not wait for this peer.
                    if (group := last_word.result().group) is not None:
                        self._leave_group(group.group_id)
            raise
        finally:
            # An await here could raise a cancellation that is due, and the answer would be lost. So no await if done.
            if not last_word.done():
                await cancel_and_wait(last_word)

    async def _tell_expectation(self, search: GroupSearch) -> None:
        """Tell the leader how many members this peer expects, whenever that has changed."""
        expected = search.control.expected_group_size
        if search.leader is not None and search.asked is not None and expected != search.told_expectation:
            search.told_expectation = expected
            # If the call is broken, the task that waits for the leader's answer notices it.
            with suppress(StreamClosedError):
                await search.asked.send(Expectation(expected_group_size=expected))

    def _take_answer(self, search: GroupSearch, leader: PeerID, promised: float, reply: JoinReply) -> None:
        search.note_answer(leader, promised, reply.code)
        if reply.code == Code.GROUP_STARTS and reply.group is not None:
            search.group.set_result(self._adopt(reply.group, leader))
            return
        if reply.better_leader is not None:
            if (better := learn(self.p2p, reply.better_leader)) != self.p2p.peer_id:
                search.note_redirection(better, reply.expiration)
        elif reply.code == Code.BAD_EXPIRATION_TIME:
            search.note_candidate(leader, reply.expiration)
        elif reply.code in (Code.SETTINGS_DIFFER, Code.REFUSED):
            search.refusals[str(leader)] = reason = one_line(reply.text)
            self._warn_seldom("peer %s refuses to average with this one: %s", leader, reason, about=leader)
        logger.debug("%s answered %s %s", leader, reply.code, quoted(reply.text))

    # --- leading ------------------------------------------------------------------------------------------------------

    async def answer_join(self, call: Call, request: JoinRequest, remote: PeerID) -> None:
        """Answer a peer that asks this one to lead it, and tell it the outcome later."""
        search, started = self.search, self._started
        # A follower whose connection broke asks again: the group has started, but the news did not reach it.
        if started is not None and started.is_for(remote, request):
            await call.send(JoinReply(code=Code.GROUP_STARTS, group=started.start), end=True)
            return
        refusal = self._reason_to_refuse(search, request, remote)
        if refusal is None and request.mode != AveragingMode.AUX and self._trust.admits is not None:
            admitted = await self._trust.admits(remote)
            search = self.search  # it may have ended meanwhile
            refusal = self._reason_to_refuse(search, request, remote)
            refusal = refusal if admitted else JoinReply(code=Code.OTHER_MODEL)
        if refusal is not None or search is None:
            await call.send(refusal or JoinReply(code=Code.NOT_LOOKING_FOR_GROUP), end=True)
            return
        follower = follower_of(self.p2p, remote, request, self._trust)
        search.followers[remote] = follower
        search.lost.pop(remote, None)
        news = asyncio.ensure_future(self._hear(search, call, follower))
        try:
            await call.send(JoinReply(code=Code.ACCEPTED, expiration=search.expiration))
            search.control.changed.set()
            await call.send(await follower.outcome, end=True)
            await first_completed(asyncio.shield(news), timeout=self.settings.request_timeout)
        finally:  # a follower that leaves cancels this handler
            await cancel_and_wait(news)
            if search.followers.get(remote) is follower:
                del search.followers[remote]
                search.note_loss(remote, follower)
                search.control.changed.set()

    async def _hear(self, search: GroupSearch, call: Call, follower: Follower) -> None:
        """Note the messages of a follower about its expectations, until it ends its side of the call."""
        try:
            while (news := await call.receive(Expectation)) is not None:
                follower.expected_group_size, follower.has_left = news.expected_group_size, news.leaves
                if news.leaves and not follower.outcome.done():
                    follower.outcome.set_result(JoinReply(code=Code.GROUP_DISBANDED))
                search.control.changed.set()
        except CALL_FAILURES as e:
            if not follower.outcome.done():
                follower.outcome.set_exception(e)

    def _reason_to_refuse(self, search: GroupSearch | None, request: JoinRequest, remote: PeerID) -> JoinReply | None:
        if not (self.settings if search is None else search.settings).leads:
            return JoinReply(code=Code.PROTOCOL_VIOLATION)
        if search is None or search.group.done() or request.group_key != search.key:
            return JoinReply(code=Code.NOT_LOOKING_FOR_GROUP)
        if remote in search.refused:
            search.turn_away(remote)
            return JoinReply(code=Code.REFUSED, text=self.refusals.reason_of(remote))
        if difference := difference_of(self.settings.agreed, request.settings):
            seen_here = difference_of(request.settings, self.settings.agreed)
            self._warn_seldom("peer %s cannot average with this one: %s", remote, seen_here, about=remote)
            return JoinReply(code=Code.SETTINGS_DIFFER, text=difference)
        if search.leader is not None:
            leader, expiration = search.leader
            return JoinReply(code=Code.NOT_A_LEADER, better_leader=record_of(self.p2p, leader), expiration=expiration)
        if search.expiration > request.expiration:
            return JoinReply(code=Code.BAD_EXPIRATION_TIME, expiration=search.expiration)
        if remote == self.p2p.peer_id or remote in search.followers:
            return JoinReply(code=Code.DUPLICATE_PEER_ID)
        if is_full(search, self.p2p, remote, request):
            return JoinReply(code=Code.GROUP_IS_FULL)
        return None

    async def answer_invitation(self, call: Call, invitation: Invitation) -> None:
        """Answer a peer that offers to lead. Its call is held until this peer joins on it or has decided otherwise."""
        search = self.search
        if search is None or invitation.group_key != search.key:
            self.former_members.note_invitation(call.remote, invitation)
        elif call.remote in search.refused:
            search.turn_away(call.remote)
            await call.send(InvitationReply(), end=True)
        else:
            await self._invitations.hold(search, call, invitation)

    def send_followers_away(self, search: GroupSearch, leader: PeerID | None) -> None:
        """Release all followers, and name another leader to them if one is given."""
        reply = JoinReply(code=Code.GROUP_DISBANDED)
        if leader is not None and search.leader is not None:
            reply.better_leader, reply.expiration = record_of(self.p2p, leader), search.leader[1]
        for follower in search.followers.values():
            if not follower.outcome.done():
                follower.outcome.set_result(reply)
        search.followers.clear()

    def start_group(self, search: GroupSearch) -> None:
        """Start the group as its leader, and announce it to all followers, including those that may still return."""
        take_back_lost(search, self.p2p)
        start = describe_group(self.p2p, search)
        for follower in search.followers.values():
            if not follower.outcome.done():
                follower.outcome.set_result(JoinReply(code=Code.GROUP_STARTS, group=start))
        self._started = StartedGroup(start, {peer: each.request for peer, each in search.followers.items()})
        search.followers.clear()
        search.group.set_result(self._adopt(start))

    def _adopt(self, start: GroupStart, leader: PeerID | None = None) -> GroupInfo:
        group = read_group(self.p2p, start, self.settings.total_size, self._trust, leader)
        self.keys.update_key_on_group_assembled(group)
        return group

    # --- the end ------------------------------------------------------------------------------------------------------

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self.background[task] = None
        task.add_done_callback(self.background.pop)

    async def close(self) -> None:
        """Finish background work, such as withdrawing from the DHT, within a second."""
        with suppress(TimeoutError):
            # A cancelled search begins its withdrawal when it ends, so the lock is awaited first.
            async with asyncio.timeout(1.0), self._one_at_a_time:
                running = [*self.background, *self._invitations.tasks]
                if running:
                    await asyncio.wait(running)
        await cancel_and_wait(*self.background, *self._invitations.tasks)
