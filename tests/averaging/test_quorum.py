"""Rounds that do not wait for everybody."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging import DecentralizedAverager
from shoal.averaging.control import AveragingMode
from shoal.averaging.round.coordinator import Coordinator
from shoal.averaging.round.traffic import Delivery
from shoal.compression import Float16Compression
from shoal.dht import DHT
from shoal.errors import AllreduceException
from tests.averaging.swarm import Swarm, make_control, owner_of, until
from tests.dht.virtual_time import alone_in_virtual_time, in_virtual_time

pytestmark = pytest.mark.once

SIZE = 30_000


async def start(seed, number=4, **changes):
    swarm = Swarm(seed)
    tensors = [torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) for i in range(number)]
    for tensor in tensors:
        await swarm.add([tensor], **{"quorum": 3, "quorum_grace": 0.1, **changes})
    return swarm, tensors


def check(controls, swarm, tensors, before, contributors, late):
    """All hold the same, exactly the mean of those who delivered, and the results say who that was."""
    mean = sum(before[i] for i in contributors) / len(contributors)
    of_all = torch.isclose(tensors[0], sum(before) / len(before), atol=1e-6)  # what the late one has reduced itself
    mean[of_all] = tensors[0][of_all]
    assert of_all.float().mean() < 0.3 or late is None
    for i, (control, tensor) in enumerate(zip(controls, tensors, strict=True)):
        control.result()
        torch.testing.assert_close(tensor, mean)
        assert torch.equal(tensor, tensors[0])
        result = control.round
        assert result.share_averaged == 1
        assert result.late == (i == late)
        weights = dict(zip(result.peers, result.weights, strict=True))
        assert weights == {n.p2p.peer_id: float(j in contributors) for j, n in enumerate(swarm.nodes)}


@pytest.mark.parametrize("seed", range(6))
@alone_in_virtual_time
async def test_a_member_triggered_late_gets_the_result(seed):
    """The order of the members differs from seed to seed: whoever coordinates may be the late one."""
    swarm, tensors = await start(seed)
    before = [tensor.clone() for tensor in tensors]
    controls = [make_control(node, expected_group_size=4, triggered=i != 0) for i, node in enumerate(swarm.nodes)]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    assert not controls[0].done()
    for tensor in tensors[1:]:
        tensor.mul_(1)  # they may go on: the result for the late one is a copy
    controls[0].allow_allreduce()
    await running[0]
    check(controls, swarm, tensors, before, (1, 2, 3), late=0)
    await swarm.close()


@pytest.mark.parametrize("seconds", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(6))
@alone_in_virtual_time
async def test_a_slow_sender_gets_the_result(monkeypatch, seed, seconds):
    """It waits for the result as long as that takes: the others may not be done, or its own line may be slow."""
    swarm, tensors = await start(seed, part_size_bytes=2**12, sender_timeout=1.0, reducer_timeout=2.0)
    before = [tensor.clone() for tensor in tensors]
    send_parts, commit = Delivery.send_parts, Coordinator.commit

    async def slow(self, call):
        if owner_of(swarm, self._traffic.vector) is swarm.nodes[0]:
            await asyncio.Event().wait()  # for ever, it must be interrupted
        await send_parts(self, call)

    async def commit_later(self, action):
        await asyncio.sleep(seconds)
        await commit(self, action)

    monkeypatch.setattr(Delivery, "send_parts", slow)
    monkeypatch.setattr(Coordinator, "commit", commit_later)
    controls = [make_control(node, expected_group_size=4) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(c) for node, c in zip(swarm.nodes, controls, strict=True)])
    check(controls, swarm, tensors, before, (1, 2, 3), late=0)
    await swarm.close()


@alone_in_virtual_time
async def test_only_the_latest_results_are_kept():
    """Each one takes as much memory as the tensors, and somebody may be late in every round."""
    swarm, _ = await start(0, sender_timeout=1000.0, reducer_timeout=2000.0)
    for _ in range(12):
        controls = [make_control(node, expected_group_size=4, triggered=i != 0) for i, node in enumerate(swarm.nodes)]
        running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
        await asyncio.gather(*running[1:])
        running[0].cancel()
        await asyncio.wait(running[:1])
    async with asyncio.timeout(100.0):
        await until(lambda: all(len(node.rounds.lingering) <= 2 for node in swarm.nodes))
    assert sum(len(node.rounds.lingering) for node in swarm.nodes) > 0, "whoever is late now still gets its result"
    await swarm.close()


@alone_in_virtual_time
async def test_delivery_within_the_grace_is_not_late():
    swarm, tensors = await start(0, quorum=2, quorum_grace=15.0)
    before = [tensor.clone() for tensor in tensors]
    controls = [make_control(node, expected_group_size=4) for node in swarm.nodes]
    await asyncio.wait_for(
        asyncio.gather(*[node.run_step(c) for node, c in zip(swarm.nodes, controls, strict=True)]), 10
    )  # not even the grace is waited for
    check(controls, swarm, tensors, before, (0, 1, 2, 3), late=None)
    await until(lambda: all(len(node.rounds) == 0 for node in swarm.nodes))
    await swarm.close()


@alone_in_virtual_time
async def test_the_late_one_may_be_in_client_mode():
    swarm = Swarm(1)
    tensors = [torch.full((50,), float(i)) for i in range(3)]
    for i, tensor in enumerate(tensors):
        mode = AveragingMode.CLIENT if i == 0 else AveragingMode.NODE
        await swarm.add([tensor], quorum=2, quorum_grace=0.05, mode=mode)
    controls = [make_control(node, expected_group_size=3, triggered=i != 0) for i, node in enumerate(swarm.nodes)]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    controls[0].allow_allreduce()
    await running[0]
    assert [tensor.tolist() for tensor in tensors] == [[1.5] * 50] * 3
    assert controls[0].round.late
    await swarm.close()


@alone_in_virtual_time
async def test_a_late_member_gets_a_lossy_result():
    swarm, tensors = await start(2, compression=Float16Compression())
    before = [tensor.clone() for tensor in tensors]
    controls = [make_control(node, expected_group_size=4, triggered=i != 0) for i, node in enumerate(swarm.nodes)]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    controls[0].allow_allreduce()
    await running[0]
    for tensor in tensors:
        torch.testing.assert_close(tensor, sum(before[1:]) / 3, rtol=2e-3, atol=2e-3)
    await swarm.close()


@in_virtual_time
async def test_the_result_is_not_kept_for_ever(monkeypatch):
    swarm, tensors = await start(3, sender_timeout=0.5, reducer_timeout=1.0)
    controls = [
        make_control(node, expected_group_size=4, triggered=i != 0, allow_retries=False)
        for i, node in enumerate(swarm.nodes)
    ]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[1:])
    await until(lambda: not any(len(node.rounds) for node in swarm.nodes[1:]))
    mine = tensors[0].clone()
    controls[0].allow_allreduce()
    await running[0]
    with pytest.raises(AllreduceException):
        controls[0].result()
    assert torch.equal(tensors[0], mine)
    await swarm.close()


@pytest.mark.parametrize(
    "options", [{"quorum": 0}, {"quorum": 2, "quorum_grace": -1.0}, {"quorum": 2, "averaging_alpha": 0.5}]
)
def test_bad_quorums_are_refused(options):
    dht = DHT(start=True)
    with pytest.raises(ValueError, match="quorum="):
        DecentralizedAverager([torch.zeros(1)], dht, start=False, prefix="run", **options)
    dht.shutdown()
