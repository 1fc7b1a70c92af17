"""Steps of several phases, steps under several tags, and the rounds that others look for."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging.messages import RoundStatus
from shoal.averaging.round.parts import rescale_shares
from shoal.averaging.round.session import (
    MAX_REMEMBERED_ROUNDS,
    MAX_UNKNOWN_ROUNDS,
    MAX_WAITING_CALLS,
    ActiveRounds,
    RoundIsCommitted,
)
from shoal.averaging.tensor_lock import TensorLock
from shoal.errors import AllreduceException
from shoal.p2p import PeerID
from tests.averaging.swarm import Swarm, make_control, until
from tests.dht.virtual_time import alone_in_virtual_time, in_virtual_time

pytestmark = pytest.mark.once

GROUP, PEER = b"g" * 20, PeerID(b"peer")


class Squares:
    """Averages the values, then the squares of the differences from that average: the second needs the first."""

    def __init__(self):
        self.variance = torch.zeros(())

    async def __call__(self, session, tensors, infos):
        mean = tensors[0].clone()
        await session.all_reduce([mean])
        squares = (tensors[0] - mean).square().sum().reshape(1)
        await session.all_reduce([squares])
        self.variance = squares[0]
        tensors[0].copy_(mean)


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5)])
@alone_in_virtual_time
async def test_second_phase_sees_the_average_of_the_first(weights):
    swarm, steps = Swarm(), [Squares() for _ in weights]
    tensors = [torch.randn(5000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    before = torch.stack(tensors)
    for tensor, step in zip(tensors, steps, strict=True):
        await swarm.add([tensor], average=step, phases="mean, variance")
    controls = [
        make_control(node, weight=weight, expected_group_size=3)
        for node, weight in zip(swarm.nodes, weights, strict=True)
    ]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    share = torch.tensor(weights)[:, None] / sum(weights)
    mean = (before * share).sum(0)
    variance = ((before - mean).square().sum(1, keepdim=True) * share).sum()
    for tensor, step, control in zip(tensors, steps, controls, strict=True):
        torch.testing.assert_close(tensor, mean)
        torch.testing.assert_close(step.variance, variance)
        assert torch.equal(tensor, tensors[0])
        assert control.round.share_averaged == 1
        assert control.round.failed_peers == ()
    await until(lambda: all(len(node.rounds) == 0 for node in swarm.nodes))
    await swarm.close()


@in_virtual_time
async def test_a_member_that_fails_between_phases_is_left_out_of_the_next():
    swarm = Swarm()

    async def leave_after_the_first(session, tensors, infos):
        await session.all_reduce([tensors[0]])
        raise RuntimeError("out of memory")

    async def twice(session, tensors, infos):
        await session.all_reduce([tensors[0]])
        await session.all_reduce([tensors[1]])

    tensors = [[torch.full((100,), float(i)), torch.full((30,), float(i))] for i in range(3)]
    for i, each in enumerate(tensors):
        await swarm.add(
            each,
            average=leave_after_the_first if i == 2 else twice,
            phases="two",
            sender_timeout=3.0,
            reducer_timeout=6.0,
        )
    controls = [make_control(node, expected_group_size=3, allow_retries=False) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    with pytest.raises(RuntimeError, match="out of memory"):
        controls[2].result()
    for i in (0, 1):
        assert tensors[i][0].tolist() == [1.0] * 100
        assert tensors[i][1].tolist() == [0.5] * 30
        assert controls[i].round.failed_peers == (swarm.nodes[2].p2p.peer_id,)
    await swarm.close()


@pytest.mark.parametrize("leaver", [0, 1])
@alone_in_virtual_time
async def test_nobody_waits_for_a_member_that_has_left_before_it_sent_anything(leaver):
    """There is one part: the other member may have nothing to send, and only wait for what will never come."""
    swarm, waited = Swarm(), []

    async def leave_after_the_first(session, tensors, infos):
        await session.all_reduce([tensors[0]])
        raise RuntimeError("out of memory")

    async def twice(session, tensors, infos):
        await session.all_reduce([tensors[0]])
        begun = asyncio.get_running_loop().time()
        try:
            await session.all_reduce([tensors[1]])
        finally:
            waited.append(asyncio.get_running_loop().time() - begun)

    tensors = [[torch.full((100,), float(i)), torch.full((30,), float(i))] for i in range(2)]
    for i, each in enumerate(tensors):
        await swarm.add(each, average=leave_after_the_first if i == leaver else twice, phases="two")
    controls = [make_control(node, expected_group_size=2, allow_retries=False) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    with pytest.raises(AllreduceException, match="every other member failed"):
        controls[1 - leaver].result()
    assert tensors[1 - leaver][1].tolist() == [1.0 - leaver] * 30
    assert waited[0] < swarm.nodes[0].config.sender_timeout / 2
    await swarm.close()


@pytest.mark.parametrize("leavers", [{0}, {1}, {2}, {0, 1}, {2, 3}], ids=str)
@alone_in_virtual_time
async def test_member_that_left_early_is_not_in_result(leavers):
    """Only one member has something to reduce. The coordinator may be another one, which waits for nobody's parts."""
    swarm = Swarm()

    async def leave(session, tensors, infos):
        raise RuntimeError("not with these")

    async def stay(session, tensors, infos):
        await session.all_reduce(tensors)

    tensors = [torch.tensor([float(i)]) for i in range(5)]
    for i, tensor in enumerate(tensors):
        await swarm.add([tensor], average=leave if i in leavers else stay, phases="one")
    controls = [make_control(node, expected_group_size=5, allow_retries=False) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    left = {swarm.nodes[i].p2p.peer_id for i in leavers}
    for i in set(range(5)) - leavers:
        assert set(controls[i].round.failed_peers) == left
    await swarm.close()


class StopsAfter:
    """Its first attempt does so many all-reduces and then nothing more."""

    def __init__(self, phases):
        self.phases, self.attempts = phases, 0

    async def __call__(self, session, tensors, infos):
        self.attempts += 1
        for tensor in tensors[: self.phases] if self.attempts == 1 else tensors:
            await session.all_reduce([tensor])
        if self.attempts == 1:
            await asyncio.Event().wait()


@pytest.mark.parametrize("phases", [0, 1])
@alone_in_virtual_time
async def test_an_attempt_that_has_changed_the_tensors_is_the_last_one(phases):
    swarm, steps = Swarm(), [StopsAfter(phases) for _ in range(2)]
    tensors = [[torch.full((100,), float(i)), torch.full((30,), float(i))] for i in range(2)]
    for each, step in zip(tensors, steps, strict=True):
        await swarm.add(each, average=step, phases="two", allreduce_timeout=0.3)
    controls = [make_control(node, expected_group_size=2) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    for each, step, control in zip(tensors, steps, controls, strict=True):
        if phases == 0:
            assert [tensor.tolist() for tensor in each] == [[0.5] * 100, [0.5] * 30]
            assert control.exception(timeout=0) is None
        else:
            error = control.exception()
            assert isinstance(error, AllreduceException)
            assert error.share_averaged == 1
            assert "took longer than 0.3 s; 100.0 % of the values were averaged before" in str(error)
        assert step.attempts == 2 - phases
    await swarm.close()


@alone_in_virtual_time
async def test_peers_with_other_phases_do_not_meet():
    swarm = Swarm()
    await swarm.add([torch.zeros(1)])
    await swarm.add([torch.ones(1)], phases="two")
    controls = [make_control(node, timeout=1.0) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    for control in controls:
        assert isinstance(control.exception(), AllreduceException)
    assert any("phases is 'two' " in str(c.exception()) or "'two' here" in str(c.exception()) for c in controls)
    await swarm.close()


@alone_in_virtual_time
async def test_rounds_with_different_tags_run_at_the_same_time():
    """Each all-reduce begins only when the other one has begun, too: one after the other would never end."""
    swarm, begun = Swarm(), [asyncio.Event(), asyncio.Event()]
    tags = {"embedding": (0,), "rest": (1, 2)}

    async def average(session, tensors, infos):
        begun[len(tensors) - 1].set()
        await begun[0].wait()
        await begun[1].wait()
        await session.all_reduce(tensors, infos)

    tensors = [[torch.full((50,), float(i + 10 * j)) for j in range(3)] for i in range(2)]
    for each in tensors:
        await swarm.add(each, tags=tags, average=average)
    controls = [(node, make_control(node, expected_group_size=2, tag=tag)) for node in swarm.nodes for tag in tags]
    await asyncio.gather(*[node.run_step(control) for node, control in controls])
    for each in tensors:
        assert [tensor.tolist() for tensor in each] == [[0.5 + 10 * j] * 50 for j in range(3)]
    assert len({control.round.group_id for _, control in controls}) == 2
    await swarm.close()


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ((50, 50), 10, (5, 5)),
        ((1, 0, 2), 7, (2, 0, 5)),
        ((3, 3, 3), 7, (3, 2, 2)),
        ((7, 0), 0, (0, 0)),
        ((0, 0), 0, (0, 0)),
        ((2**40, 2**40 + 1), 2**41 + 1, (2**40, 2**40 + 1)),
    ],
)
def test_a_split_for_another_size_keeps_the_proportion(shares, total, expected):
    assert rescale_shares(shares, total) == expected
    assert sum(rescale_shares(shares, total)) == total


def test_an_empty_split_does_not_fit_values():
    with pytest.raises(ValueError, match="cannot split 3 values"):
        rescale_shares((0, 0), 3)


class ShortRound:
    """A round that ends when it is told to."""

    is_committed = False

    def __init__(self):
        self.has_result, self.may_finish = asyncio.Event(), asyncio.Event()

    async def run(self, failed_before):
        await self.has_result.wait()
        return "result"

    async def finish(self, linger):
        await self.may_finish.wait()


@pytest.mark.parametrize("is_committed", [True, False])
@alone_in_virtual_time
async def test_a_call_may_come_before_its_round(is_committed):
    rounds, current = ActiveRounds(), ShortRound()
    current.is_committed = is_committed
    early = asyncio.ensure_future(rounds.find(GROUP + b"\x01", PEER, patience=60))
    await asyncio.sleep(0)
    assert rounds.status(GROUP + b"\x01") is RoundStatus.UNKNOWN
    running = asyncio.ensure_future(rounds.run(GROUP + b"\x01", current))
    assert await early is current
    assert rounds.status(GROUP + b"\x01") is RoundStatus.RUNNING
    assert await rounds.find(GROUP + b"\x01", PEER, patience=60) is current
    current.has_result.set()
    assert await running == "result"
    assert rounds.status(GROUP + b"\x01") is RoundStatus.FINISHED
    assert await rounds.find(GROUP + b"\x01", PEER, patience=60) is current  # it still has to end politely
    current.may_finish.set()
    await asyncio.gather(*[task for _, task in rounds.lingering.values()])
    with pytest.raises(RoundIsCommitted) if is_committed else pytest.raises(AllreduceException, match="has left it"):
        await rounds.find(GROUP + b"\x01", PEER, patience=60)
    assert rounds.status(GROUP + b"\x02") is RoundStatus.UNKNOWN  # a later phase may still come
    later = asyncio.ensure_future(rounds.find(GROUP + b"\x02", PEER, patience=60))
    await asyncio.sleep(0)
    rounds.leave_group(GROUP)
    with pytest.raises(AllreduceException, match="left the group"):
        await later
    assert rounds.status(GROUP + b"\x01") is (RoundStatus.FINISHED if is_committed else RoundStatus.LEFT)
    assert rounds.status(GROUP + b"\x02") is RoundStatus.LEFT
    assert len(rounds) == 0


@in_virtual_time
async def test_one_member_takes_few_of_the_places_for_early_calls():
    rounds, greedy = ActiveRounds(), PeerID(b"greedy")
    unknown = [i.to_bytes(21, "big") for i in range(MAX_UNKNOWN_ROUNDS + 1)]
    calls = [asyncio.ensure_future(rounds.find(each, greedy, patience=60)) for each in unknown]
    await asyncio.sleep(0)
    assert [call.done() for call in calls] == [False] * MAX_UNKNOWN_ROUNDS + [True]
    with pytest.raises(AllreduceException, match="already waits for 8 rounds"):
        calls[-1].result()
    # Calls of the same round, over which it spreads what it sends, and those of other members still wait.
    more = [asyncio.ensure_future(rounds.find(*each, patience=60)) for each in ((unknown[0], greedy), (GROUP, PEER))]
    await asyncio.sleep(0)
    assert not any(call.done() for call in more)
    results = await asyncio.gather(*calls[:-1], *more, return_exceptions=True)
    assert {type(result) for result in results} == {TimeoutError}
    assert len(rounds) == 0
    again = asyncio.ensure_future(rounds.find(unknown[-1], greedy, patience=60))
    await asyncio.sleep(0)
    assert not again.done()
    await asyncio.wait([again])


@in_virtual_time
async def test_calls_for_rounds_that_never_come_leave_nothing():
    rounds = ActiveRounds()
    ids = [(i.to_bytes(21, "big"), PeerID(i.to_bytes(2, "big"))) for i in range(MAX_WAITING_CALLS)]
    calls = [asyncio.ensure_future(rounds.find(*each, patience=0.05)) for each in ids]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await rounds.find(GROUP, PEER, patience=0.05)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [AllreduceException] + [TimeoutError] * (MAX_WAITING_CALLS - 1)
    assert "too many calls" in str(results[0])
    assert len(rounds) == 0
    for i in range(2 * MAX_REMEMBERED_ROUNDS):
        rounds.leave_group(i.to_bytes(20, "big"))
    assert len(rounds.finished) == MAX_REMEMBERED_ROUNDS


@alone_in_virtual_time
async def test_a_crowd_does_not_keep_members_from_calling_early():
    members = {PeerID(b"member %d" % i) for i in range(2)}
    rounds, current = ActiveRounds(members.__contains__), ShortRound()
    early = [asyncio.ensure_future(rounds.find(GROUP + b"0", peer, patience=50)) for peer in members]
    crowd = [
        asyncio.ensure_future(rounds.find(i.to_bytes(21, "big"), PeerID(i.to_bytes(2, "big")), patience=50))
        for i in range(2 * MAX_WAITING_CALLS)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(call.done() for call in early)
    assert sum(call.done() for call in crowd) == len(crowd) + len(early) - MAX_WAITING_CALLS
    running = asyncio.ensure_future(rounds.run(GROUP + b"0", current))
    assert await asyncio.gather(*early) == [current, current]
    current.has_result.set()
    current.may_finish.set()
    await running
    for call in crowd:
        call.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


@alone_in_virtual_time
async def test_holders_of_different_tensors_do_not_exclude_each_other():
    lock, order = TensorLock(), []

    async def hold(name, tensors, until=None):
        async with lock.hold_async(tensors):
            order.append(name)
            if until is not None:
                await until.wait()

    leave = asyncio.Event()
    first = asyncio.ensure_future(hold("0 and 1", (0, 1), leave))
    second = asyncio.ensure_future(hold("2", (2,), leave))
    await until(lambda: len(order) == 2)
    assert order == ["0 and 1", "2"]
    everything = asyncio.ensure_future(hold("all", None))
    await asyncio.sleep(0)
    behind = asyncio.ensure_future(hold("3", (3,)))  # free, but it must not overtake who waits for all
    await asyncio.sleep(0.01)
    assert order == ["0 and 1", "2"]
    everything.cancel()
    await asyncio.gather(everything, return_exceptions=True)
    await behind
    leave.set()
    await asyncio.gather(first, second)
    with lock.hold():
        pass
    assert order == ["0 and 1", "2", "3"]
    assert lock.tickets == []
