"""What others are told by an averager that leaves while it looks for a group."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

from shoal.averaging.control import Absence
from shoal.averaging.groups.search import Answers, Tick
from shoal.averaging.messages import Code
from shoal.errors import DHTError
from shoal.p2p import Identity
from tests.averaging.swarm import Swarm, make_control, until
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = pytest.mark.once


async def start_a_search(node):
    """The averager looks for a group, and has told the table so."""
    step = asyncio.ensure_future(node.run_step(make_control(node)))
    matchmaking = node.lanes[""].matchmaking
    await until(lambda: matchmaking.current is not None and matchmaking.current.declared.is_set())
    return step


@alone_in_virtual_time
async def test_an_averager_that_closes_while_it_looks_for_a_group_has_withdrawn():
    swarm = Swarm()
    get = swarm.table.get

    async def get_and_be_slow_to_stop(*args, **kwargs):
        try:
            await asyncio.sleep(60)
            return await get(*args, **kwargs)
        finally:
            await asyncio.sleep(0.1)

    swarm.table.get = get_and_be_slow_to_stop
    node = await swarm.add([torch.zeros(4)])
    step = await start_a_search(node)
    step.cancel()
    await node.close()
    (record,) = (entry for key, entries in swarm.table.records.items() if "0b" in key for entry in entries.values())
    assert record.value is None
    await swarm.close()


@alone_in_virtual_time
async def test_a_table_that_is_closed_before_is_no_failure_that_nobody_has_seen():
    swarm = Swarm()
    unseen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(str(context)))
    node = await swarm.add([torch.zeros(4)])
    step = await start_a_search(node)

    async def refuse(*_, **__):
        raise DHTError("the search was ended: this node is being shut down")

    swarm.table.store = refuse
    step.cancel()
    await asyncio.wait([step])
    await until(lambda: not node.lanes[""].matchmaking.background)
    gc.collect()
    assert unseen == []
    del swarm.table.store
    await swarm.close()


async def make_leader_and_follower(swarm, **options):
    """The leader has promised to start first; the follower waits for that."""
    leader = await swarm.add([torch.zeros(4)], min_matchmaking_time=5.0, **options)
    follower = await swarm.add([torch.ones(4)], min_matchmaking_time=8.0, **options)
    control = make_control(leader, expected_group_size=3, allow_retries=False)
    follower_control = make_control(follower, expected_group_size=3)
    leading = asyncio.ensure_future(leader.run_step(control))
    following = asyncio.ensure_future(follower.run_step(follower_control))
    matchmaking = leader.lanes[""].matchmaking
    await until(lambda: matchmaking.current is not None and matchmaking.current.search.followers)
    await until(lambda: follower.lanes[""].matchmaking.current.search.asking.follows)
    return leader, leading, control, following, follower_control


@alone_in_virtual_time
async def test_a_follower_that_gives_up_is_in_no_group():
    """If its connection had broken, it would be expected to come back."""
    swarm = Swarm()
    leader, leading, control, following, _ = await make_leader_and_follower(swarm)
    [gone] = leader.lanes[""].matchmaking.current.search.followers
    third = await swarm.add([torch.full((4,), 2.0)], min_matchmaking_time=9.0)
    matchmaking = leader.lanes[""].matchmaking
    following.cancel()
    await until(lambda: matchmaking.current.search.peers[gone].follower is None)
    control.expected_group_size = 2
    await third.run_step(make_control(third, expected_group_size=2))
    await leading
    assert set(control.round.peers) == {leader.p2p.peer_id, third.p2p.peer_id}
    assert torch.equal(leader.tensors[0], torch.ones(4))
    await swarm.close()


@alone_in_virtual_time
async def test_a_follower_that_gives_up_while_the_group_starts_is_not_waited_for():
    swarm = Swarm()
    patience = {"sender_timeout": 300.0, "reducer_timeout": 600.0}  # longer than a test may take
    leader, leading, control, following, follower_control = await make_leader_and_follower(swarm, **patience)
    matchmaking = leader.lanes[""].matchmaking
    start = matchmaking.current.start_group

    def start_and_lose_the_follower(followers):
        start(followers)
        following.cancel()

    matchmaking.current.start_group = start_and_lose_the_follower
    control.expected_group_size = follower_control.expected_group_size = 2
    await asyncio.wait([leading])
    assert control.round is None or control.round.failed_peers
    await swarm.close()


ENDS = pytest.mark.parametrize("end", ["cancelled", "broken"])


def end_search(step, search, end):
    """The search has no result any more, but its task notices that only in the next turn of the loop."""
    if end == "cancelled":
        step.cancel()
    else:
        search.group.set_exception(DHTError("the table is closed"))
    assert search.group.done()
    assert not search.search.is_over


class CallOfStranger:
    """The leader's side of the call of a peer that asks to join."""

    def __init__(self) -> None:
        self.sent = []

    async def send(self, message, *, end):
        self.sent.append((message.code, end))

    async def receive(self, kind):
        await asyncio.Event().wait()


@ENDS
@alone_in_virtual_time
async def test_a_search_that_has_just_ended_lets_nobody_in(end):
    swarm = Swarm()
    leader, leading, _, following, _ = await make_leader_and_follower(swarm)
    search = leader.lanes[""].matchmaking.current
    [request] = [follower.request for follower in search.search.followers.values()]
    end_search(leading, search, end)
    call = CallOfStranger()
    await search.answer_join(call, request, Identity.generate().peer_id)  # with it, the group would be complete
    assert call.sent == [(Code.NOT_LOOKING_FOR_GROUP, True)]
    following.cancel()
    await asyncio.wait([leading, following])
    await swarm.close()


@ENDS
@alone_in_virtual_time
async def test_a_search_that_has_just_ended_starts_no_group(end):
    swarm = Swarm()
    leader, leading, control, following, _ = await make_leader_and_follower(swarm)
    _, follower = swarm.nodes
    follows = follower.lanes[""].matchmaking.current
    search = leader.lanes[""].matchmaking.current
    end_search(leading, search, end)
    control.expected_group_size = 2  # complete
    search.on(Tick())
    await until(lambda: follows.search.peers[leader.p2p.peer_id].cause is not None)
    assert follows.search.peers[leader.p2p.peer_id].cause.absence is Absence.DISBANDED
    assert search.started is None
    assert not follows.group.done()
    following.cancel()
    await asyncio.wait([leading, following])
    await swarm.close()


@ENDS
@alone_in_virtual_time
async def test_a_follower_whose_search_has_just_ended_leaves_the_group_that_starts(end):
    swarm = Swarm()
    _, leading, control, following, _ = await make_leader_and_follower(swarm)
    _, follower = swarm.nodes
    search = follower.lanes[""].matchmaking.current
    on, groups = search.on, []

    def end_before_the_answer(event):
        if isinstance(event, Answers):
            groups.append(event.group.group_id)
            end_search(following, search, end)
        on(event)

    search.on = end_before_the_answer
    control.expected_group_size = 2
    await asyncio.wait([following])
    assert len(groups) == 1
    assert search.left == groups
    leading.cancel()
    await asyncio.wait([leading])
    await swarm.close()
