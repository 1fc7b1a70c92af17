"""Liars who take part: an averager that does not do what it should. Each changes one of its own pieces.

They begin as honest members, so that the others have seen them deliver.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import torch

from shoal.averaging.control import GroupInfo, StepControl
from shoal.averaging.groups.group import describe_group, read_group
from shoal.averaging.groups.matchmaking import Matchmaking, SearchShell, StartedGroup
from shoal.averaging.groups.search import Follower
from shoal.averaging.messages import GroupStart, PartStatus
from shoal.averaging.node import AveragerNode, Lane
from shoal.averaging.round.exchange import AllReduce
from shoal.errors import AllreduceException
from shoal.net.transport import MOST
from shoal.p2p import PeerID

Lie = Callable[[AveragerNode], None]
CONSTANT = 7.0
FAR_AWAY = 10**9


def _in_each_round(node: AveragerNode, change: Callable[[AllReduce], None]) -> None:
    run = node.rounds.run

    def run_changed(round_id: bytes, current: Any, *rest: Any, **more: Any) -> Awaitable[Any]:
        change(current.allreduce)
        return run(round_id, current, *rest, **more)

    node.rounds.run = run_changed  # type: ignore[method-assign, assignment]


def withholds_averages(node: AveragerNode) -> None:
    """A member. Says "alive", takes all parts, gives no averages. Rounds must not wait for it again and again."""

    def keep_quiet(allreduce: AllReduce) -> None:
        async def reply(index: int, sender: int) -> Any:
            await asyncio.Event().wait()

        allreduce.reducer.reply = reply  # type: ignore[method-assign]

    _in_each_round(node, keep_quiet)


def claims_all_the_weight(node: AveragerNode) -> None:
    """A member. Its weight is 2⁵³, the largest number that may be told. Its gradients must not be the average."""
    session_of = node.session

    def session(group: GroupInfo, lane: Lane, weight: float) -> Any:
        made = session_of(group, lane, weight)
        made.weight = float(MOST)
        return made

    node.session = session  # type: ignore[method-assign]


def gives_everybody_another_average(node: AveragerNode) -> None:
    """A member that reduces. Other averages for each of the others: their models drift apart, and nobody is told."""

    def lie(allreduce: AllReduce) -> None:
        honest = allreduce.reducer.reply

        async def reply(index: int, sender: int) -> Any:
            await honest(index, sender)
            part = allreduce.vector.parts[allreduce.own_index][index]
            return part.compress(torch.full((part.length,), float(sender))), PartStatus.VALUES

        allreduce.reducer.reply = reply  # type: ignore[method-assign]

    _in_each_round(node, lie)


SECONDS_LATE = 2.0


def sends_each_piece_late(node: AveragerNode) -> None:
    """A member. Each part and each average leaves two seconds late. Rounds must not take that long again and again."""

    def delay(allreduce: AllReduce) -> None:
        for traffic in allreduce._traffic.values():
            for outgoing in (traffic.parts_out, traffic.averages_out):
                outgoing._encode = _late(outgoing._encode)

    _in_each_round(node, delay)


def _late(encode: Callable[[int], Awaitable[Any]]) -> Callable[[int], Awaitable[Any]]:
    async def encode_late(index: int) -> Any:
        await asyncio.sleep(SECONDS_LATE)
        return await encode(index)

    return encode_late


def sends_what_is_not_finite(node: AveragerNode) -> None:
    """A faulty member. Its values become NaN after it has checked them. The average must be that of the others."""

    def spoil(allreduce: AllReduce) -> None:
        vector = allreduce.vector
        vector.encode = lambda part: part.compress(torch.full((part.length,), math.nan))  # type: ignore[method-assign]

    _in_each_round(node, spoil)


def says_that_it_comes_and_never_does(node: AveragerNode) -> None:
    """A faulty member: its tracker works, its averager is stuck. It must not be waited for in every epoch."""

    async def hang(control: Any) -> None:
        await asyncio.Event().wait()

    node.run_step = hang  # type: ignore[method-assign]


def expects_a_million_others(node: AveragerNode) -> None:
    """A member. Tells each leader that there are far more members to come: groups must not wait for them each time."""
    run_step = node.run_step

    def expect_many(control: StepControl) -> Awaitable[None]:
        expect = control.expect

        def expect_more(peers: Collection[PeerID], least: int = 0) -> None:
            expect(peers, least)
            control.expected_group_size = 10**6

        control.expect = expect_more  # type: ignore[method-assign, assignment]
        return run_step(control)

    node.run_step = expect_many  # type: ignore[method-assign, assignment]


def offers_a_state_of_constants(node: AveragerNode) -> None:
    """A donor of the highest priority. All parameters are 7. Nobody who trains may take it over."""
    sharing, honest = node.state_sharing, node.state_sharing.get_state

    def get_state() -> Any:
        state = honest()
        for tensor in state[1]:
            tensor.fill_(CONSTANT)
        return state

    sharing.get_state = get_state
    sharing.set(priority=1e12)
    # Whatever its owner says of it later.
    sharing.set = lambda **settings: type(sharing).set(sharing, allowed=settings.get("allowed"))  # type: ignore


def offers_a_state_of_the_far_future(node: AveragerNode) -> None:
    """A donor. Its state is of epoch 10⁹: a schedule that follows step by step would take half an hour."""
    offers_a_state_of_constants(node)
    sharing, constants = node.state_sharing, node.state_sharing.get_state

    def get_state() -> Any:
        state = constants()
        state[0]["epoch"] = FAR_AWAY
        return state

    sharing.get_state = get_state


def leads_each_into_a_group_of_two(node: AveragerNode) -> None:
    """A member. Promises to start first, and gives each follower a group of two with itself: all averages differ."""
    [lane] = node.lanes.values()
    matchmaking, tasks = lane.matchmaking, set[asyncio.Task[Any]]()
    run_step, matchmaking.settings.min_matchmaking_time = node.run_step, matchmaking.settings.min_matchmaking_time / 2

    def hurry(control: StepControl) -> Awaitable[None]:
        control.scheduled_time -= matchmaking.settings.min_matchmaking_time
        return run_step(control)

    node.run_step = hurry  # type: ignore[method-assign, assignment]

    async def average(start: GroupStart, weight: float) -> None:
        group = read_group(node.p2p, start, matchmaking.settings.total_size)
        with contextlib.suppress(AllreduceException):
            await node.session(group, lane, weight).all_reduce([each.clone() for each in lane.tensors], lane.infos)
        node.rounds.leave_group(group.group_id)

    def begin(control: StepControl, now: float) -> SearchShell:
        shell = Matchmaking.begin(matchmaking, control, now)

        def start_groups(followers: Mapping[PeerID, Follower]) -> None:
            for peer, follower in followers.items():
                start = describe_group(node.p2p, shell.search.settings, {peer: follower}, control.data_for_gather)
                shell.tell_follower(peer, start)
                if shell.group.done():
                    tasks.add(asyncio.ensure_future(average(start, control.weight)))
                else:
                    shell.started = StartedGroup(start, {peer: follower.request})
                    shell.group.set_result(read_group(node.p2p, start, matchmaking.settings.total_size))

        shell.start_group = start_groups  # type: ignore[method-assign]
        return shell

    matchmaking.begin = begin  # type: ignore[method-assign]


LIES: dict[str, Lie] = {
    lie.__name__: lie
    for lie in (
        withholds_averages,
        claims_all_the_weight,
        gives_everybody_another_average,
        sends_each_piece_late,
        sends_what_is_not_finite,
        says_that_it_comes_and_never_does,
        expects_a_million_others,
        leads_each_into_a_group_of_two,
        offers_a_state_of_constants,
        offers_a_state_of_the_far_future,
    )
}
