"""Requests to join a group, invitations, and how they are answered."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from shoal.averaging.control import StepControl
from shoal.averaging.messages import Code, Invitation, InvitationReply, JoinReply, JoinRequest
from shoal.base.clock import get_dht_time
from shoal.errors import P2PHandlerError
from shoal.testing import Link
from tests.simulation.searches import WINDOW, Swarm, done, leader_of, simulate, size

# --- requests that are refused ----------------------------------------------------------------------------------------


async def ask(swarm: Swarm, request: JoinRequest, *, by: int, at: int) -> JoinReply:
    """Ask an averager to lead another one; returns its first answer."""

    async def call() -> JoinReply:
        stub = swarm.nodes[by].stub(swarm.nodes[at].p2p.peer_id)
        async with stub.rpc_join_group() as line:
            await line.send(request, end=True)
            reply = await line.receive(JoinReply)
            assert reply is not None
            return reply

    asked = swarm.nodes[at].p2p
    swarm.nodes[by].p2p.add_addresses(asked.peer_id, asked.get_addresses(asked.peer_id))
    return await swarm.host(by).run(call())


def request_of(swarm: Swarm, **changes: Any) -> JoinRequest:
    agreed = swarm.nodes[0].lanes[""].matchmaking.settings.agreed
    fields = {"group_key": "simulation.0b", "settings": agreed, "expiration": 1e10, "mode": 0, **changes}
    return JoinRequest(**fields)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, Code.ACCEPTED),
        ({"group_key": "simulation.0b1"}, Code.NOT_LOOKING_FOR_GROUP),
        ({"group_key": "other.0b"}, Code.NOT_LOOKING_FOR_GROUP),
        ({"group_key": ""}, Code.NOT_LOOKING_FOR_GROUP),
        ({"expiration": 0.0}, Code.BAD_EXPIRATION_TIME),
        ({"settings": {}}, Code.SETTINGS_DIFFER),
        ({"settings": {"compression": "other"}}, Code.SETTINGS_DIFFER),
    ],
)
def test_answers_to_requests(changes, code):
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        swarm.step(0)
        await asyncio.sleep(1.0)
        reply = await ask(swarm, request_of(swarm, **changes), by=1, at=0)
        assert reply.code == code

    simulate(story)


@pytest.mark.parametrize(
    "changes",
    [{"expiration": math.nan}, {"expiration": -math.inf}, {"expiration": math.inf}, {"mode": 7}, {"mode": -1}],
)
def test_impossible_requests_are_refused_with_a_reason(changes):
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        swarm.step(0)
        await asyncio.sleep(1.0)
        with pytest.raises(P2PHandlerError, match=f"invalid JoinRequest.*{next(iter(changes))}"):
            await ask(swarm, request_of(swarm, **changes), by=1, at=0)

    simulate(story)


def test_who_does_not_look_for_a_group_says_so():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        assert (await ask(swarm, request_of(swarm), by=1, at=0)).code == Code.NOT_LOOKING_FOR_GROUP

    simulate(story)


def test_a_follower_tells_who_leads_it():
    async def story(swarm: Swarm) -> None:
        await swarm.add(3)
        for index in range(2):
            swarm.step(index)
        await asyncio.sleep(2.0)
        leader = leader_of(swarm)
        reply = await ask(swarm, request_of(swarm), by=2, at=1 - leader)
        assert reply.code == Code.NOT_A_LEADER
        assert reply.better_leader is not None
        assert reply.better_leader.peer_id == swarm.nodes[leader].p2p.peer_id.to_bytes()

    simulate(story)


def test_who_follows_already_is_refused_and_stays():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        steps = swarm.steps()
        await asyncio.sleep(2.0)
        leader = leader_of(swarm)
        reply = await ask(swarm, request_of(swarm), by=1 - leader, at=leader)
        assert reply.code == Code.DUPLICATE_PEER_ID
        await done(*steps)
        assert {size(step) for step in steps} == {2}

    simulate(story)


def test_a_full_group_refuses():
    async def story(swarm: Swarm) -> None:
        await swarm.add(3, target_group_size=2)
        for index in range(2):
            control = StepControl(get_dht_time() + WINDOW, get_dht_time() + 60)
            swarm.host(index).spawn(swarm.nodes[index].run_step(control))
        await asyncio.sleep(2.0)  # the group is made, and waits for its triggers
        for index in range(2):
            assert (await ask(swarm, request_of(swarm), by=2, at=index)).code == Code.NOT_LOOKING_FOR_GROUP

    simulate(story)


def test_those_whose_connections_broke_do_not_overfill_a_group():
    """A stranger could join and break off again and again, until the group does not fit into a message."""

    async def story(swarm: Swarm) -> None:
        await swarm.add(4, target_group_size=3)
        leading, asked = swarm.step(0), swarm.nodes[0].p2p
        await asyncio.sleep(1.0)

        async def join_and_break_off() -> None:
            swarm.nodes[1].p2p.add_addresses(asked.peer_id, asked.get_addresses(asked.peer_id))
            async with swarm.nodes[1].stub(asked.peer_id).rpc_join_group() as line:
                await line.send(request_of(swarm))
                assert (await line.receive(JoinReply)).code == Code.ACCEPTED
                line.connection.abort()

        others = [swarm.step(2), swarm.step(3)]
        await swarm.host(1).run(join_and_break_off())
        await done(leading, *others)
        assert [size(step) for step in (leading, *others)] == [3, 3, 3]

    simulate(story)


# --- invitations ------------------------------------------------------------------------------------------------------


async def invite(swarm: Swarm, *, by: int, to: int, expiration: float, key: str = "simulation.0b") -> InvitationReply:
    """Invite an averager as another one would; returns its answer, an empty one if it just ends the call."""

    async def call() -> InvitationReply:
        async with swarm.nodes[by].stub(swarm.nodes[to].p2p.peer_id).rpc_invite() as line:
            await line.send(Invitation(group_key=key, expiration=expiration))
            reply = await line.receive(InvitationReply) or InvitationReply()
            await line.send_end()
            return reply

    asked = swarm.nodes[to].p2p
    swarm.nodes[by].p2p.add_addresses(asked.peer_id, asked.get_addresses(asked.peer_id))
    return await swarm.host(by).run(call())


def test_who_does_not_look_declines_invitations():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        assert await invite(swarm, by=1, to=0, expiration=get_dht_time() + 1) == InvitationReply()
        swarm.step(0)
        await asyncio.sleep(0.5)
        for changes in ({"key": "simulation.0b1"}, {"key": "other.0b"}, {"key": ""}):
            reply = await invite(swarm, by=1, to=0, **{"expiration": get_dht_time() + 1, **changes})
            assert reply == InvitationReply(), changes
        with pytest.raises(P2PHandlerError, match=r"invalid Invitation.*expiration"):
            await invite(swarm, by=1, to=0, expiration=math.nan)

    simulate(story)


def test_who_leads_itself_says_so_to_those_who_invite_it():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        swarm.step(0)
        await asyncio.sleep(0.5)
        reply = await invite(swarm, by=1, to=0, expiration=get_dht_time() + 60)
        assert reply.request is None
        assert reply.better_leader is not None
        assert reply.better_leader.peer_id == swarm.nodes[0].p2p.peer_id.to_bytes()

    simulate(story)


def test_who_is_invited_comes_on_the_same_call():
    async def story(swarm: Swarm) -> None:
        await swarm.add(2)
        swarm.step(0, gather="mine")
        await asyncio.sleep(0.5)
        reply = await invite(swarm, by=1, to=0, expiration=get_dht_time() + 1)
        assert reply.request is not None
        assert reply.request.group_key == "simulation.0b"
        assert reply.request.settings == swarm.nodes[0].lanes[""].matchmaking.settings.agreed

    simulate(story)


def test_of_two_invitations_of_one_peer_the_later_one_counts():
    async def story(swarm: Swarm) -> None:
        await swarm.add(3)
        swarm.host(2).firewalled = True
        swarm.network.set_link(swarm.host(0), swarm.host(2), Link(delay=0.5))
        swarm.step(2, expected_group_size=2)
        await asyncio.sleep(1.0)
        swarm.step(0)  # is going to ask the other one, which takes long, and meanwhile holds its invitations
        await asyncio.sleep(0.5)
        later = get_dht_time() + 4.0
        first = asyncio.ensure_future(invite(swarm, by=1, to=0, expiration=later))
        await asyncio.sleep(0.4)
        assert not first.done()
        second = asyncio.ensure_future(invite(swarm, by=1, to=0, expiration=later))
        assert await first == InvitationReply()
        assert not second.done()
        second.cancel()

    simulate(story)
