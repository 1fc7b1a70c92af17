"""Parts that travel to a reducer over several connections at once."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

from shoal.averaging.messages import BeginReduce, PartMessage, PartStatus, describe_part
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.traffic import MAX_STRIPES, SECONDS_PER_STRIPE, Delivery, Intake
from shoal.compression import CompressionInfo, NoCompression
from shoal.errors import P2PHandlerError
from shoal.p2p import P2P, Call
from tests.averaging.swarm import Swarm, make_control, owner_of, until
from tests.dht.virtual_time import alone_in_virtual_time, in_virtual_time

pytestmark = pytest.mark.once

SIZE = 40_000


@pytest.fixture
def far_away(monkeypatch):
    """Peers believe that they are far from each other."""

    def set_round_trip(seconds):
        monkeypatch.setattr(P2P, "round_trip_to", lambda self, peer: seconds)

    return set_round_trip


def count_stripes(monkeypatch):
    seen, run_stripe = set(), Delivery.run_stripe

    async def counted(self, begin):
        seen.add((begin.stripe, begin.stripes))
        await run_stripe(self, begin)

    monkeypatch.setattr(Delivery, "run_stripe", counted)
    return seen


async def start(number=3, **changes):
    swarm = Swarm()
    tensors = [torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) for i in range(number)]
    for tensor in tensors:
        await swarm.add([tensor], part_size_bytes=2**10, **changes)
    return swarm, tensors


async def run(swarm, **changes):
    controls = [make_control(node, expected_group_size=len(swarm.nodes), **changes) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    return controls


@pytest.mark.parametrize(("round_trip", "stripes"), [(0.0, 1), (0.03, 1), (0.06, 2), (0.1, 4), (5.0, MAX_STRIPES)])
@alone_in_virtual_time
async def test_longer_links_get_more_stripes(monkeypatch, far_away, round_trip, stripes):
    far_away(round_trip)
    seen = count_stripes(monkeypatch)
    swarm, tensors = await start()
    mean = sum(tensors) / 3
    for control in await run(swarm):
        assert control.result()
        assert control.round.share_averaged == 1
    for tensor in tensors:
        torch.testing.assert_close(tensor, mean)
        assert torch.equal(tensor, tensors[0])
    assert seen == {(stripe, stripes) for stripe in range(stripes)}
    await swarm.close()


@alone_in_virtual_time
async def test_few_parts_take_one_connection(monkeypatch, far_away):
    far_away(1.0)
    seen = count_stripes(monkeypatch)
    swarm = Swarm()
    for i in range(2):
        await swarm.add([torch.full((300,), float(i))])
    await run(swarm)
    assert seen == {(0, 1)}
    await swarm.close()


@pytest.mark.parametrize("round_trip", [0.0, 4 * SECONDS_PER_STRIPE])
@alone_in_virtual_time
async def test_long_links_mix_parts_and_averages(monkeypatch, far_away, round_trip):
    far_away(round_trip)
    by_callers, by_callees, giving = set(), set(), set()
    give, send = Intake.give_averages, Call.send

    async def note_kind(self, header, *payload, **options):
        if isinstance(header, PartMessage) and header.parts:
            (by_callees if asyncio.current_task() in giving else by_callers).add(header.is_average)
        await send(self, header, *payload, **options)

    async def note_callee(self, call):
        giving.add(asyncio.current_task())
        await give(self, call)

    monkeypatch.setattr(Intake, "give_averages", note_callee)
    monkeypatch.setattr(Call, "send", note_kind)
    swarm, tensors = await start()
    await run(swarm)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    is_far = round_trip > 0
    assert by_callers == ({True, False} if is_far else {False})
    assert by_callees == ({True, False} if is_far else {True})
    await swarm.close()


@pytest.mark.parametrize("broken_stripe", [0, 1, 3])
@alone_in_virtual_time
async def test_a_broken_stripe_costs_at_most_its_member(monkeypatch, far_away, broken_stripe):
    """The others end with the same bytes, and each value is a mean over those who delivered it to its reducer.

    The member whose connections break lives on and reduces its share with those that still reach it.
    """
    far_away(4 * SECONDS_PER_STRIPE)
    swarm, tensors = await start(4)
    before = [tensor.clone() for tensor in tensors]
    send_parts, calls = Delivery.send_parts, {}

    async def break_one(self, call):
        stripe = calls[self] = calls.get(self, -1) + 1
        if owner_of(swarm, self._traffic.vector) is swarm.nodes[0] and stripe == broken_stripe:
            for _ in range(2):
                await self._traffic.parts_out.send_next(call)
            raise ConnectionAbortedError("killed")
        await send_parts(self, call)

    monkeypatch.setattr(Delivery, "send_parts", break_one)
    controls = [make_control(node, expected_group_size=4, allow_retries=False) for node in swarm.nodes]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running)
    found = torch.zeros(SIZE, dtype=torch.bool)
    for size in (2, 3, 4):  # never what only the broken one has
        for members in itertools.combinations(before, size):
            found |= torch.isclose(tensors[1], sum(members) / size, atol=1e-6)
    assert found.all()
    for i in (1, 2, 3):
        assert controls[i].round.share_averaged == 1
        assert torch.equal(tensors[i], tensors[1])
    await swarm.close()


@pytest.mark.parametrize(
    "second",
    [
        {"stripe": 2, "stripes": 2},
        {"stripe": -1, "stripes": 2},
        {"stripe": 0, "stripes": MAX_STRIPES + 1},
        {"stripe": 0, "stripes": 2},
        {"stripe": 1, "stripes": 3},
        {"stripe": 1, "stripes": 2, "weight": 2.0},
    ],
)
@alone_in_virtual_time
async def test_stripes_that_make_no_sense_are_refused(monkeypatch, second):
    swarm, _ = await start(2, sender_timeout=50.0, reducer_timeout=50.0)
    refused = []

    async def contradict(self, begin):
        other = next(node for node in swarm.nodes if node is not owner_of(swarm, self._traffic.vector))
        async with self._open_call() as first_call, self._open_call() as second_call:
            common = {"round_id": begin.round_id, "weight": begin.weight}
            await first_call.send(BeginReduce(**common, stripe=0, stripes=2))
            await until(lambda: other.rounds.running and next(iter(other.rounds.running.values())).allreduce.intakes)
            await second_call.send(BeginReduce(**{**common, **second}))
            try:
                await second_call.receive(PartMessage)
            except P2PHandlerError as e:
                refused.append(str(e))

    monkeypatch.setattr(Delivery, "run_stripe", contradict)
    running = asyncio.create_task(run(swarm, allow_retries=False))
    await until(lambda: refused)
    running.cancel()  # it would wait for stripes that never come
    await asyncio.gather(running, return_exceptions=True)
    await swarm.close()


@in_virtual_time
async def test_a_member_with_missing_stripes_is_given_up(monkeypatch, far_away):
    far_away(2 * SECONDS_PER_STRIPE)
    swarm, tensors = await start(3, sender_timeout=1.0, reducer_timeout=2.0)
    victim, run_stripe = swarm.nodes[0].p2p.peer_id, Delivery.run_stripe

    async def half(self, begin):
        if owner_of(swarm, self._traffic.vector) is not swarm.nodes[0] or begin.stripe == 0:
            await run_stripe(self, begin)
        else:
            await asyncio.Event().wait()

    monkeypatch.setattr(Delivery, "run_stripe", half)
    controls = [make_control(node, expected_group_size=3, allow_retries=False) for node in swarm.nodes]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    assert torch.equal(tensors[1], tensors[2])
    assert victim in controls[1].round.failed_peers
    running[0].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await swarm.close()


def test_averages_are_applied_in_order():
    tensor = torch.zeros(30)
    info = CompressionInfo.from_tensor(tensor, key=0)
    vector = RoundVector([tensor], [info], NoCompression(), 40, [30], 1.0)
    assert len(vector.parts[0]) == 3
    vector.take(0, 2, torch.full((10,), 3.0))
    assert vector.held == [0]
    assert not tensor.any()
    vector.take(0, 0, torch.full((10,), 1.0))
    assert vector.held == [1]
    vector.drop_early()
    vector.take(0, 1, torch.full((10,), 2.0))
    assert vector.held == [2]
    assert tensor.tolist() == [1.0] * 10 + [2.0] * 10 + [0.0] * 10


@pytest.mark.parametrize("what", ["twice", "too few", "of nobody"])
@alone_in_virtual_time
async def test_parts_that_are_not_due_end_the_sender(monkeypatch, what):
    swarm, tensors = await start(3)
    send_parts = Delivery.send_parts

    async def wrong(self, call):
        if owner_of(swarm, self._traffic.vector) is not swarm.nodes[0]:
            return await send_parts(self, call)
        parts = self._traffic.vector.parts[self._traffic.other]
        for index in {"twice": [0, 0], "too few": [0], "of nobody": [len(parts)]}[what]:
            header, payload = describe_part(PartStatus.VALUES, self._traffic.vector.encode(parts[0]))
            await call.send(PartMessage(index, [header]), *payload)
        await call.send(PartMessage())

    monkeypatch.setattr(Delivery, "send_parts", wrong)
    controls = [make_control(node, expected_group_size=3, allow_retries=False) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    for i in (1, 2):
        assert swarm.nodes[0].p2p.peer_id in controls[i].round.failed_peers
        assert controls[i].round.share_averaged == 1
    assert torch.equal(tensors[1], tensors[2])
    await swarm.close()


@alone_in_virtual_time
async def test_connections_are_made_while_the_trigger_is_awaited(far_away):
    far_away(1.0)
    swarm, _ = await start(3)
    controls = [make_control(node, expected_group_size=3, triggered=False) for node in swarm.nodes]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    needed = 2 * 3  # to two others: at least two stripes, and one call for the end of the round
    await until(lambda: all(node.p2p.pool.idle_count >= needed and not node.connecting for node in swarm.nodes))
    dialled = [node.p2p.metrics.connections_dialled for node in swarm.nodes]
    for control in controls:
        control.allow_allreduce()
    await asyncio.gather(*running)
    assert [node.p2p.metrics.connections_dialled for node in swarm.nodes] == dialled
    await swarm.close()
