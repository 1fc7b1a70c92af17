"""Finding a group: who averages with whom in the next round.

Every peer that looks for a group declares in the DHT until when it promises to start. Among those that see each
other the one with the smallest (promised time, peer id) leads; everybody asks the smallest peer it knows of to be
led by it. Since a peer only ever follows a smaller one, there can be no ring of peers that wait for each other, and
so a peer that asks, or waits to be told the group, still answers those who ask it:

- while it asks a leader it accepts followers; once it is accepted itself it sends them on to its leader;
- while it follows, it tells who asks where its leader is.

A leader starts as soon as the group is complete (it has the target size, or as many members as any of them
expects), or at its promised time if it has enough members. It waits a little longer for followers whose connection
broke shortly before; one that had no time to return is a member nevertheless, and hears of it when it does. Because
records spread with a delay, a peer that sees others without seeing a smaller one also invites them, so that of two
peers it is enough if one sees the other (see :mod:`shoal.averaging.groups.leading`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

from shoal.averaging.control import AveragingMode, GroupInfo, StepControl
from shoal.averaging.groups.candidates import Follower, MatchmakingSettings, Search, StartedGroup, Trust
from shoal.averaging.groups.keys import GroupKeyManager
from shoal.averaging.groups.leading import (
    REFUSAL,
    Invitations,
    Refusals,
    describe_group,
    difference_of,
    follower_of,
    is_full,
    learn,
    read_group,
    record_of,
)
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
from shoal.clock import get_dht_time
from shoal.errors import (
    AllreduceException,
    DHTError,
    P2PHandlerError,
    ProtocolError,
    ReactorError,
    StreamClosedError,
)
from shoal.logs import Seldom, counted, one_line, quoted
from shoal.p2p import P2P, Call, PeerID, StubBase
from shoal.p2p.transport import MOST
from shoal.tasks import cancel_and_wait, first_completed

logger = logging.getLogger(__name__)

# Between two looks at the table; they become longer, since most peers begin at the same time.
FIRST_LOOKUP_PAUSE = 0.1
MAX_LOOKUP_PAUSE = 1.0
# Seconds for the way to the leader and back, when this peer gives up.
GOODBYE_SECONDS = 1.0
# Lookups at the same time: one that waits for slow nodes does not keep the next one from being made.
MAX_LOOKUPS = 3


class Matchmaking:
    """Looks for groups on behalf of one averager, and answers those who look for it."""

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
        self._trust, self._leave_group = trust or Trust(), leave_group
        self._get_stub = get_stub
        self.refusals = Refusals()
        self._invitations = Invitations(p2p, get_stub, self.answer_join)
        self._one_at_a_time = asyncio.Lock()
        self._search: Search | None = None
        self._started: StartedGroup | None = None
        # Expiration of the latest record which says that this peer does not look for a group.
        self._withdrawn_until = -math.inf
        # A dictionary keeps the order, so that simulations can be repeated.
        self._background: dict[asyncio.Task[Any], None] = {}
        self._warn_seldom = Seldom(logger.warning)
        self._last_refusals: dict[str, str] = {}

    # --- looking ------------------------------------------------------------------------------------------------------

    async def look_for_group(self, control: StepControl) -> GroupInfo:
        """Find a group for a step.

        Raises:
            AllreduceException: none was found before the step's deadline.
        """
        try:
            async with asyncio.timeout(control.get_timeout()), self._one_at_a_time:
                return await self._run_search(control)
        except TimeoutError:
            raise AllreduceException(self._explain_failure()) from None

    async def _run_search(self, control: StepControl) -> GroupInfo:
        loop = asyncio.get_running_loop()
        expiration = self._promised_time(control)
        search = Search(
            self.p2p.peer_id,
            self.settings,
            control,
            self.keys.current_key,
            expiration,
            loop.create_future(),
            refused=self.refusals.next_search(),
        )
        self._search, self._last_refusals = search, search.refusals
        try:
            return await self._work_on(search)
        except asyncio.CancelledError:
            # This peer gives up in the moment in which its group starts.
            if search.group.done():
                self._leave_group(search.group.result().group_id)
            raise
        finally:
            self._invitations.end(search)
            self._send_followers_away(search, None)
            if self.settings.leads and search.declared.is_set():
                self._withdrawn_until = math.nextafter(search.expiration, math.inf)
                self._in_background(self._withdraw(search))

    async def _work_on(self, search: Search) -> GroupInfo:
        tasks = [asyncio.ensure_future(work) for work in (self._discover(search), self._lead_or_follow(search))]
        if self.settings.leads:
            tasks.append(asyncio.ensure_future(self._declare(search)))
        try:
            waited: list[asyncio.Future[Any]] = [search.group, *tasks]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not search.group.done():
                    task.result()  # raises what broke the search
            return await search.group
        finally:
            # Nobody may join any more.
            self._search = None
            await cancel_and_wait(*tasks)

    def _explain_failure(self) -> str:
        refusals = "".join(f"\n  {peer}: {reason}" for peer, reason in self._last_refusals.items())
        detail = f"; peers that refused:{refusals}" if refusals else ""
        least = counted(self.settings.min_group_size, "peer")
        return f"could not find a group of at least {least} under {self.keys.current_key} in time{detail}"

    def _promised_time(self, control: StepControl) -> float:
        earliest = get_dht_time() + self.settings.min_matchmaking_time
        promised = min(max(control.scheduled_time, earliest), control.deadline, MOST)
        # Without this the table keeps the withdrawal.
        return max(promised, math.nextafter(self._withdrawn_until, math.inf))

    async def _declare(self, search: Search) -> None:
        while True:
            await self.keys.declare_averager(search.key, self.p2p.peer_id, search.expiration)
            search.declared.set()
            await search.redeclare.wait()
            search.redeclare.clear()

    async def _withdraw(self, search: Search) -> None:
        try:
            await self.keys.declare_averager(search.key, self.p2p.peer_id, search.expiration, looking_for_group=False)
        except (DHTError, ReactorError) as e:
            # The table may be closed already; what it was told expires soon.
            logger.debug("could not tell the table that this peer does not look for a group any more: %s", e)

    async def _discover(self, search: Search) -> None:
        """Look who else is there, at first often and only where it is quick."""
        lookups: dict[asyncio.Task[None], None] = {}
        has_declared, pause = not self.settings.leads, 0.0
        try:
            while True:
                if has_declared:
                    await asyncio.sleep(pause * (0.75 + 0.5 * self.p2p.rng.random()))
                else:
                    # A peer declares itself first and looks afterwards: of two, one sees the other.
                    await first_completed(search.declared.wait(), timeout=max(pause, FIRST_LOOKUP_PAUSE))
                    has_declared = search.declared.is_set()
                if search.leader is None and len(lookups) < MAX_LOOKUPS:
                    lookup = asyncio.ensure_future(self._look(search, quickly=pause < MAX_LOOKUP_PAUSE))
                    lookups[lookup] = None
                    await asyncio.wait([lookup], timeout=MAX_LOOKUP_PAUSE)
                for done in [lookup for lookup in lookups if lookup.done()]:
                    del lookups[done]
                    done.result()
                pause = min(max(2 * pause, FIRST_LOOKUP_PAUSE), MAX_LOOKUP_PAUSE)
        finally:
            await cancel_and_wait(*lookups)

    async def _look(self, search: Search, quickly: bool) -> None:
        for peer, expiration in await self.keys.get_averagers(search.key, only_active=True, quickly=quickly):
            if peer != self.p2p.peer_id:
                search.note_candidate(peer, expiration)
        self._invitations.invite_followers(search)

    async def _lead_or_follow(self, search: Search) -> None:
        while not search.group.done():
            search.control.changed.clear()
            candidate = search.best_candidate()
            # One look: if the time came between two, followers would be taken for nobody.
            now = get_dht_time()
            if self._may_start(search, now):
                self._start_group(search)
            elif candidate is not None:
                await self._ask_until_start(search, candidate)
            else:
                await self._wait_for_news(search, now)

    def _may_start(self, search: Search, now: float) -> bool:
        size = 1 + len(search.followers)
        if not self.settings.leads or size < self.settings.min_group_size:
            return False
        full = self.settings.target_group_size is not None and size >= self.settings.target_group_size
        is_time = not search.control.keep_open and now >= search.start_time()
        return full or search.is_complete() or is_time

    async def _wait_for_news(self, search: Search, now: float) -> None:
        # Nobody came: make a new promise.
        if self.settings.leads and now >= search.start_time():
            self._send_followers_away(search, None)
            search.lost.clear()
            search.expiration = self._promised_time(search.control)
            search.redeclare.set()
        until = search.next_moment()
        try:
            async with asyncio.timeout(None if until is None else max(0.001, until - get_dht_time())):
                await search.control.changed.wait()
        except TimeoutError:
            return

    # --- following ----------------------------------------------------------------------------------------------------

    async def _ask_until_start(self, search: Search, leader: PeerID) -> None:
        """Ask to be led, but only until this peer may start as a leader, if there is no answer yet."""
        ask = asyncio.ensure_future(self._ask(search, leader))
        try:
            while not ask.done():
                search.control.changed.clear()
                until_start = search.start_time() - get_dht_time() if self.settings.leads else MAX_LOOKUP_PAUSE
                await first_completed(
                    asyncio.shield(ask), search.control.changed.wait(), timeout=max(0.01, until_start)
                )
                is_open = search.leader is None and not ask.done()
                if is_open and (self._may_start(search, get_dht_time()) or search.has_shorter_way()):
                    return
                await self._tell_expectation(search)
            ask.result()
        finally:
            await cancel_and_wait(ask)

    async def _ask(self, search: Search, leader: PeerID) -> None:
        """Ask to be led; returns when there is a group, or nothing to hope for from this peer at the moment."""
        promised = search.candidates[leader]
        search.asked = None
        offer = search.offers.get(leader)
        reply = None
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.settings.request_timeout):
                    way = self._get_stub(leader).rpc_join_group() if offer is None else offer.taken()
                    call = await stack.enter_async_context(way)
                    request = self._request(search)
                    await call.send(request if offer is None else InvitationReply(request=request))
                    search.asked, search.told_expectation = call, request.expected_group_size
                    reply = await _receive(call)
                if reply.code == Code.ACCEPTED:
                    start = search.note_acceptance(leader, reply.expiration)
                    self._send_followers_away(search, leader)
                    await self._tell_expectation(search)
                    reply = await self._wait_for_start(call, start)
                search.asked = None
                # The leader has left, but what it said holds.
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
            search.note_failure(leader, e)
            self.p2p.note_uncalled(leader, e, company=search.key.partition(".")[0], sign_of_life=promised)
        else:
            try:
                self._take_answer(search, leader, promised, reply)
            except ProtocolError as e:
                self._warn_seldom("peer %s gave an answer that makes no sense: %s", leader, one_line(str(e)))
        finally:
            search.leader = None

    async def _wait_for_start(self, call: Call, expiration: float) -> JoinReply:
        """The leader's last word. If this peer gives up meanwhile, it says so."""
        # A connection whose reader is cancelled is closed, and nothing more could be said on it.
        last_word = asyncio.ensure_future(_receive(call))
        try:
            async with asyncio.timeout(max(0.0, expiration - get_dht_time()) + self.settings.request_timeout):
                return await asyncio.shield(last_word)
        except asyncio.CancelledError:
            with suppress(*CALL_FAILURES):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await call.send(Expectation(leaves=True), end=True)
                    await asyncio.wait([last_word])
                    # Has the group started in this very moment? Then its other members need not wait for this peer.
                    if (group := last_word.result().group) is not None:
                        self._leave_group(group.group_id)
            raise
        finally:
            # To wait is to be cancelled, if that was asked for in this moment. A word that is here would be lost.
            if not last_word.done():
                await cancel_and_wait(last_word)

    async def _tell_expectation(self, search: Search) -> None:
        """Keep the leader informed of how many this peer expects."""
        expected = search.control.expected_group_size
        if search.leader is not None and search.asked is not None and expected != search.told_expectation:
            search.told_expectation = expected
            # The task that waits for the leader's answer notices this.
            with suppress(StreamClosedError):
                await search.asked.send(Expectation(expected_group_size=expected))

    def _request(self, search: Search) -> JoinRequest:
        control = search.control
        return JoinRequest(
            group_key=search.key,
            settings=self.settings.agreed,
            expiration=search.expiration if self.settings.leads else min(control.deadline, MOST),
            mode=int(self.settings.mode),
            gathered=control.data_for_gather,
            bandwidth=self.settings.bandwidth,
            expected_group_size=control.expected_group_size,
        )

    def _take_answer(self, search: Search, leader: PeerID, promised: float, reply: JoinReply) -> None:
        search.spent[leader] = promised
        if reply.code == Code.GROUP_STARTS and reply.group is not None:
            search.group.set_result(self._adopt(reply.group))
            return
        if reply.better_leader is not None:
            better = learn(self.p2p, reply.better_leader)
            if better != self.p2p.peer_id:
                search.note_redirection(better, reply.expiration)
        elif reply.code == Code.BAD_EXPIRATION_TIME:
            search.note_candidate(leader, reply.expiration)
        elif reply.code in (Code.SETTINGS_DIFFER, Code.REFUSED):
            search.refusals[str(leader)] = reason = one_line(reply.text)
            self._warn_seldom("peer %s refuses to average with this one: %s", leader, reason)
        logger.debug("%s answered %s %s", leader, reply.code, quoted(reply.text))

    # --- leading ------------------------------------------------------------------------------------------------------

    async def answer_join(self, call: Call, request: JoinRequest, remote: PeerID) -> None:
        """Answer a peer that asks to be led, and tell it the outcome later."""
        search, started = self._search, self._started
        # The news did not reach it.
        if started is not None and started.followers.get(remote) == request.expiration:
            await call.send(JoinReply(code=Code.GROUP_STARTS, group=started.start), end=True)
            return
        refusal = self._reason_to_refuse(search, request, remote)
        if refusal is None and request.mode != AveragingMode.AUX and self._trust.admits is not None:
            admitted = await self._trust.admits(remote)
            search = self._search  # it may have ended meanwhile
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
        finally:  # also when the follower has left, which cancels this
            await cancel_and_wait(news)
            if search.followers.get(remote) is follower:
                del search.followers[remote]
                if not follower.has_left:
                    search.lost[remote] = (get_dht_time(), follower)
                search.control.changed.set()

    async def _hear(self, search: Search, call: Call, follower: Follower) -> None:
        """Take note of what a follower expects by now, until it has ended its side of the call."""
        try:
            while (news := await call.receive(Expectation)) is not None:
                follower.expected_group_size, follower.has_left = news.expected_group_size, news.leaves
                if news.leaves and not follower.outcome.done():
                    follower.outcome.set_result(JoinReply(code=Code.GROUP_DISBANDED))
                search.control.changed.set()
        except CALL_FAILURES as e:
            if not follower.outcome.done():
                follower.outcome.set_exception(e)

    def _reason_to_refuse(self, search: Search | None, request: JoinRequest, remote: PeerID) -> JoinReply | None:
        if not self.settings.leads:
            return JoinReply(code=Code.PROTOCOL_VIOLATION)
        if search is None or search.group.done() or request.group_key != search.key:
            return JoinReply(code=Code.NOT_LOOKING_FOR_GROUP)
        if remote in search.refused:
            search.turn_away(remote)
            return JoinReply(code=Code.REFUSED, text=REFUSAL)
        difference = difference_of(self.settings.agreed, request.settings)
        if difference:
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
        """A peer that may lead says that it is there, and waits on this call for this one to come."""
        search = self._search
        if search is not None and invitation.group_key == search.key:
            if call.remote in search.refused:
                search.turn_away(call.remote)
                await call.send(InvitationReply(), end=True)
            else:
                await self._invitations.hold(search, call, invitation)

    def _send_followers_away(self, search: Search, leader: PeerID | None) -> None:
        reply = JoinReply(code=Code.GROUP_DISBANDED)
        if leader is not None and search.leader is not None:
            reply.better_leader, reply.expiration = record_of(self.p2p, leader), search.leader[1]
        for follower in search.followers.values():
            if not follower.outcome.done():
                follower.outcome.set_result(reply)
        search.followers.clear()

    def _start_group(self, search: Search) -> None:
        """Publish the group: order, modes and shares, so that nobody has to work them out for itself."""
        for peer, (lost_at, follower) in search.lost.items():
            if lost_at + search.return_seconds > get_dht_time():
                search.followers[peer] = follower
        start = describe_group(self.p2p, search, self._trust)
        for follower in search.followers.values():
            if not follower.outcome.done():
                follower.outcome.set_result(JoinReply(code=Code.GROUP_STARTS, group=start))
        self._started = StartedGroup(start, {peer: each.request.expiration for peer, each in search.followers.items()})
        search.followers.clear()
        search.group.set_result(self._adopt(start))

    def _adopt(self, start: GroupStart) -> GroupInfo:
        group = read_group(self.p2p, start, self.settings.total_size)
        self.keys.update_key_on_group_assembled(group)
        return group

    # --- the end ------------------------------------------------------------------------------------------------------

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background[task] = None
        task.add_done_callback(self._background.pop)

    async def close(self) -> None:
        """Finish what runs in the background, such as withdrawing from the DHT."""
        with suppress(TimeoutError):
            # A search that was cancelled withdraws when it ends.
            async with asyncio.timeout(1.0), self._one_at_a_time:
                running = [*self._background, *self._invitations.tasks]
                if running:
                    await asyncio.wait(running)
        await cancel_and_wait(*self._background, *self._invitations.tasks)


async def _receive(call: Call) -> JoinReply:
    reply = await call.receive(JoinReply)
    if reply is None:
        raise ProtocolError("the leader ended without an answer")
    return reply
