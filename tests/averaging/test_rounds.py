"""Whole rounds of several averagers over an in-memory network."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
import torch

from shoal.averaging.control import AveragingMode, AveragingStage
from shoal.averaging.round import sending
from shoal.averaging.round.traffic import Traffic
from shoal.compression import Float16Compression
from shoal.errors import AllreduceException
from tests.averaging.swarm import Swarm, make_control, owner_of, until
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = [pytest.mark.devices, pytest.mark.pretend]

NODE, CLIENT, AUX = AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX
SHAPES = [(1000, 13), (7,), (), (0, 5)]


def now():
    return asyncio.get_running_loop().time()


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


async def run_round(swarm, controls):
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])


CASES = {
    "equal": ([NODE] * 4, [1, 1, 1, 1], [None] * 4, {}),
    "two_peers": ([NODE] * 2, [1, 1], [None] * 2, {}),
    "weights": ([NODE] * 4, [0.5, 2, 1e-3, 100], [None] * 4, {}),
    "a_weight_of_zero": ([NODE] * 3, [0, 1, 2], [None] * 3, {}),
    "clients": ([NODE, CLIENT, CLIENT, NODE], [1, 2, 3, 4], [None] * 4, {}),
    "one_node": ([CLIENT, CLIENT, NODE, CLIENT], [1, 2, 3, 4], [None] * 4, {}),
    "auxiliaries": ([NODE, AUX, NODE, AUX], [1, 0, 3, 0], [None] * 4, {}),
    "clients_and_auxiliary": ([CLIENT, AUX, CLIENT, CLIENT], [1, 0, 3, 2], [None] * 4, {}),
    "bandwidths": ([NODE] * 4, [1] * 4, [0.1, 5, 0, 3], {"min_vector_size": 100}),
    "one_reduces_all": ([NODE] * 4, [1] * 4, [0.0, 0.0, 1.0, 0.0], {}),
    "tiny_parts": ([NODE] * 3, [1] * 3, [None] * 3, {"part_size_bytes": 19}),
    "half_way": ([NODE] * 3, [1] * 3, [None] * 3, {"averaging_alpha": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
@alone_in_virtual_time
async def test_weighted_mean_is_exact(case):
    modes, weights, bandwidths, options = CASES[case]
    swarm = Swarm()
    tensors = [random_tensors(i) for i in range(len(modes))]
    before = [[tensor.clone() for tensor in each] for each in tensors]
    for each, mode, bandwidth in zip(tensors, modes, bandwidths, strict=True):
        await swarm.add(each, mode=mode, bandwidth=bandwidth, target_group_size=len(modes), **options)
    controls = [
        make_control(node, gather=i, weight=float(weight))
        for i, (node, weight) in enumerate(zip(swarm.nodes, weights, strict=True))
    ]
    await run_round(swarm, controls)
    everybody = {node.p2p.peer_id: i for i, node in enumerate(swarm.nodes)}
    alpha = options.get("averaging_alpha", 1.0)
    senders = [i for i, mode in enumerate(modes) if mode is not AUX]
    for i, (control, mode) in enumerate(zip(controls, modes, strict=True)):
        assert control.result() == everybody
        assert control.round.share_averaged == 1
        assert control.round.failed_peers == ()
        for k in range(len(SHAPES)):
            mean = sum(weights[j] * before[j][k].double() for j in senders) / sum(weights[j] for j in senders)
            target = before[i][k] if mode is AUX else before[i][k] + alpha * (mean - before[i][k])
            assert torch.allclose(tensors[i][k].double(), target.double(), atol=1e-6)
            if alpha == 1 and mode is not AUX:
                assert torch.equal(tensors[i][k], tensors[senders[0]][k])  # to the last bit
    await swarm.close()


@alone_in_virtual_time
async def test_a_result_tells_the_traffic_with_each_member():
    swarm, size, count = Swarm(), 3, 3000
    for _ in range(size):
        await swarm.add([torch.randn(count)])
    controls = [make_control(node, expected_group_size=size) for node in swarm.nodes]
    await run_round(swarm, controls)
    results = {node.p2p.peer_id: control.round for node, control in zip(swarm.nodes, controls, strict=True)}
    for own, result in results.items():
        assert result.traffic.keys() == set(result.peers) - {own}
        assert sum(each.bytes_sent for each in result.traffic.values()) == result.bytes_sent
        assert sum(each.bytes_received for each in result.traffic.values()) == result.bytes_received
        for other, each in result.traffic.items():
            assert each.bytes_sent == results[other].traffic[own].bytes_received > 0
            assert 0 <= each.seconds <= result.duration
    await swarm.close()


@alone_in_virtual_time
async def test_only_auxiliaries_finish_and_change_nothing():
    swarm = Swarm()
    tensors = [random_tensors(i) for i in range(3)]
    for each in tensors:
        await swarm.add(each, mode=AUX, target_group_size=3)
    controls = [make_control(node) for node in swarm.nodes]
    await run_round(swarm, controls)
    assert all(len(control.result()) == 3 for control in controls)
    assert all(
        torch.equal(a, b) for i, each in enumerate(tensors) for a, b in zip(each, random_tensors(i), strict=True)
    )
    await swarm.close()


@alone_in_virtual_time
async def test_an_auxiliary_takes_no_expected_place():
    swarm = Swarm()
    for index, mode in enumerate([NODE, NODE, AUX, NODE]):
        await swarm.add(random_tensors(index), mode=mode, min_matchmaking_time=15.0)
    controls = [make_control(node, expected_group_size=3) for node in swarm.nodes]
    early = asyncio.gather(*[node.run_step(c) for node, c in zip(swarm.nodes[:3], controls[:3], strict=True)])
    searches = [node.lanes[""].matchmaking for node in swarm.nodes[:3]]
    await until(lambda: any(len(s.current.search.followers) == 2 for s in searches if s.current is not None))
    await swarm.nodes[3].run_step(controls[3])
    await early
    assert all(len(control.result()) == 4 for control in controls)
    await swarm.close()


@alone_in_virtual_time
async def test_weights_of_zero_everywhere_change_nothing():
    swarm = Swarm()
    tensors = [random_tensors(i) for i in range(3)]
    for each in tensors:
        await swarm.add(each)
    controls = [make_control(node, weight=0.0, expected_group_size=3) for node in swarm.nodes]
    await run_round(swarm, controls)
    assert all(len(control.result()) == 3 for control in controls)
    assert all(
        torch.equal(a, b) for i, each in enumerate(tensors) for a, b in zip(each, random_tensors(i), strict=True)
    )
    await swarm.close()


@alone_in_virtual_time
async def test_half_precision_stays_within_its_rounding():
    """What comes back is a difference, which is exact where peers agree: only what was sent has been rounded."""
    swarm = Swarm()
    agreed = torch.randn(5000)
    tensors = [[agreed.clone(), torch.randn(5000, generator=torch.Generator().manual_seed(i))] for i in range(3)]
    mean = sum(each[1].double() for each in tensors) / 3
    for each in tensors:
        await swarm.add(each, compression=Float16Compression())
    await run_round(swarm, [make_control(node, expected_group_size=3) for node in swarm.nodes])
    for each in tensors:
        assert torch.allclose(each[0], agreed, atol=2e-3)  # half of fp16's spacing between 4 and 8
        assert torch.allclose(each[1].double(), mean, atol=8e-3)
    await swarm.close()


@alone_in_virtual_time
async def test_several_rounds_in_a_row_reuse_connections():
    swarm = Swarm()
    for i in range(3):
        await swarm.add(random_tensors(i))
    for _ in range(10):
        controls = [make_control(node, expected_group_size=3) for node in swarm.nodes]
        await run_round(swarm, controls)
        assert all(len(control.result()) == 3 for control in controls)
    for node in swarm.nodes:
        assert node.p2p.pool.in_use_count == 0
        await until(lambda node=node: len(node.rounds) == 0)  # they end politely in the background
        assert node.p2p.metrics.rounds_succeeded == 10
    await swarm.close()


@alone_in_virtual_time
async def test_a_client_in_no_hurry_joins_the_next_group():
    """All its searches have the same deadline, none."""
    swarm = Swarm()
    for mode in (NODE, CLIENT):
        await swarm.add(random_tensors(mode), mode=mode)
    groups = []
    for _ in range(3):
        controls = [make_control(node, timeout=math.inf) for node in swarm.nodes]
        await run_round(swarm, controls)
        assert controls[0].round.group_id == controls[1].round.group_id
        groups.append(controls[0].round.group_id)
    assert len(set(groups)) == 3
    assert not sum(node.p2p.metrics.rounds_failed for node in swarm.nodes)
    await swarm.close()


@alone_in_virtual_time
async def test_too_few_peers_fail_in_time():
    swarm = Swarm()
    node = await swarm.add(random_tensors(0), min_matchmaking_time=0.1)
    control = make_control(node, timeout=0.5)
    await node.run_step(control)
    with pytest.raises(AllreduceException, match="could not find a group of at least 2 peers"):
        control.result()
    await swarm.close()


@alone_in_virtual_time
async def test_group_without_expectation_starts_at_the_promised_time():
    swarm = Swarm()
    for i in range(3):
        await swarm.add(random_tensors(i), min_matchmaking_time=0.5)
    controls = [make_control(node) for node in swarm.nodes]
    await run_round(swarm, controls)
    assert all(len(control.result()) == 3 for control in controls)
    await swarm.close()


@alone_in_virtual_time
async def test_target_group_size_is_respected():
    swarm = Swarm()
    for i in range(4):
        await swarm.add(random_tensors(i), target_group_size=2)
    controls = [make_control(node) for node in swarm.nodes]
    await run_round(swarm, controls)
    assert [len(control.result()) for control in controls] == [2] * 4
    await swarm.close()


@alone_in_virtual_time
async def test_peers_with_other_settings_refuse_and_say_why():
    swarm = Swarm()
    await swarm.add(random_tensors(0), min_matchmaking_time=0.2)
    await swarm.add(random_tensors(1), min_matchmaking_time=0.2, compression=Float16Compression())
    controls = [make_control(node, timeout=1.0) for node in swarm.nodes]
    await run_round(swarm, controls)
    errors = [str(control.exception()) for control in controls]
    assert any(
        "compression is 'NONE' there and 'FLOAT16' here" in e or "'FLOAT16' there and 'NONE'" in e for e in errors
    )
    await swarm.close()


@alone_in_virtual_time
async def test_triggers_are_waited_for():
    swarm = Swarm()
    for i in range(4):
        await swarm.add(random_tensors(i))
    controls = [make_control(node, expected_group_size=4, triggered=i < 2) for i, node in enumerate(swarm.nodes)]
    running = asyncio.ensure_future(run_round(swarm, controls))
    await until(lambda: all(control.stage >= AveragingStage.AWAITING_TRIGGER for control in controls))
    await until(lambda: all(control.stage >= AveragingStage.RUNNING_ALLREDUCE for control in controls[:2]))
    assert [control.stage for control in controls[2:]] == [AveragingStage.AWAITING_TRIGGER] * 2
    assert not any(control.done() for control in controls)
    for control in controls[2:]:
        control.weight = 3.0
        control.allow_allreduce()
    await running
    assert all(len(control.result()) == 4 and control.stage is AveragingStage.FINISHED for control in controls)
    await swarm.close()


@pytest.mark.parametrize("limit", [None, 2])
@alone_in_virtual_time
async def test_cancelled_steps_leave_the_others_to_meet(limit):
    swarm = Swarm()
    modes = [NODE, CLIENT, NODE, CLIENT]
    for i, mode in enumerate(modes):
        await swarm.add(random_tensors(i), mode=mode, target_group_size=limit, min_matchmaking_time=0.5)
    controls = [make_control(node, triggered=False) for node in swarm.nodes]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.sleep(0.05)
    for i in (0, 1):
        controls[i].cancel()
        running[i].cancel()
    for i in (2, 3):
        controls[i].allow_allreduce()
    await asyncio.gather(*running, return_exceptions=True)
    assert controls[0].cancelled()
    assert controls[1].cancelled()
    for control in controls[2:]:
        assert set(control.result()) == {swarm.nodes[2].p2p.peer_id, swarm.nodes[3].p2p.peer_id}
    await swarm.close()


@alone_in_virtual_time
async def test_pairs_reach_the_global_mean():
    swarm = Swarm()
    tensors = [[torch.randn(100, dtype=torch.float64)] for _ in range(8)]
    mean = sum(each[0] for each in tensors) / 8
    for i, each in enumerate(tensors):
        await swarm.add(each, target_group_size=2, initial_group_bits=f"{i // 2:02b}")
    for _ in range(3):
        controls = [make_control(node) for node in swarm.nodes]
        await run_round(swarm, controls)
        assert [len(control.result()) for control in controls] == [2] * 8
        assert torch.allclose(sum(each[0] for each in tensors) / 8, mean, atol=1e-6)
    assert all(torch.allclose(each[0], mean, atol=1e-6) for each in tensors)
    await swarm.close()


class Fault:
    """Makes members of a round fail at a given moment."""

    def __init__(self, monkeypatch, swarm, kind, victims):
        self.swarm, self.kind, self.victims = swarm, kind, {swarm.nodes[i].p2p.peer_id for i in victims}
        self.steps = {}
        original, fault = Traffic.send, self

        async def send(self, call, usual, calls):
            where = "sending" if usual is self.parts_out else "reducing"
            if fault.hits(self, where):
                if where == "sending":
                    for _ in range(usual.count // 2):
                        await usual.send_next(call)
                await fault.fail(self)
            await original(self, call, usual, calls)

        monkeypatch.setattr(Traffic, "send", send)
        monkeypatch.setattr(sending, "BUNDLE_PARTS", 1)  # each part travels alone, so half of them can be sent

    def hits(self, traffic, where):
        return owner_of(self.swarm, traffic.vector).p2p.peer_id in self.victims and where in self.kind

    async def fail(self, traffic):
        if self.kind.startswith("stall"):
            await asyncio.sleep(math.inf)
        node = owner_of(self.swarm, traffic.vector)
        # What the kernel does to a killed process: every connection ends, and new ones are refused.
        node.p2p.transport.stop_listening()
        for each in node.p2p.server.tasks():
            if each is not asyncio.current_task():
                each.cancel()
        node.p2p.pool.close()
        self.steps[node].cancel()
        raise ConnectionAbortedError("killed")


async def stall(*args):
    await asyncio.sleep(math.inf)


KINDS = ["kill sending", "kill reducing", "stall sending", "stall reducing", "before", "stall before"]


@pytest.mark.parametrize("places", [*itertools.combinations(range(5), 2)])
@pytest.mark.parametrize("kind", KINDS)
@alone_in_virtual_time
async def test_three_of_five_finish_the_round(monkeypatch, kind, places):
    """Two fail; their places in the order of members decide whether they would coordinate the round."""
    swarm = Swarm()
    tensors = [[torch.randn(20_000)] for _ in range(5)]
    before = [each[0].clone() for each in tensors]
    for i, each in enumerate(tensors):
        mode = CLIENT if i == 4 else NODE
        await swarm.add(each, mode=mode, sender_timeout=0.5, reducer_timeout=1.0)
    fault = Fault(monkeypatch, swarm, kind, (0, 1))
    failing, staying = iter(swarm.nodes[:2]), iter(swarm.nodes[2:])
    order = [next(failing if place in places else staying).p2p.peer_id for place in range(5)]
    for node in swarm.nodes:
        monkeypatch.setattr(
            node.p2p.rng, "shuffle", lambda entries: entries.sort(key=lambda entry: order.index(entry[0]))
        )
    if "before" in kind:
        for i in (0, 1):
            monkeypatch.setattr(swarm.nodes[i], "average", stall if kind.startswith("stall") else None)
    controls = [make_control(node, expected_group_size=5, allow_retries=False) for node in swarm.nodes]
    began_at = now()
    running = [asyncio.ensure_future(n.run_step(c)) for n, c in zip(swarm.nodes, controls, strict=True)]
    fault.steps = dict(zip(swarm.nodes, running, strict=True))
    await asyncio.gather(*running[2:])
    assert now() - began_at < 3.0, "two that wait for each other do not hold up the rest"
    for task in running[:2]:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for i in (2, 3, 4):
        assert set(controls[i].result()) == {node.p2p.peer_id for node in swarm.nodes}
        assert controls[i].round.share_averaged == 1
        assert {swarm.nodes[k].p2p.peer_id for k in (2, 3, 4)}.isdisjoint(controls[i].round.failed_peers)
        assert torch.equal(tensors[i][0], tensors[2][0])  # survivors agree to the last bit
    found = torch.zeros(20_000, dtype=torch.bool)
    for others in ((2, 3, 4), (0, 2, 3, 4), (1, 2, 3, 4), (0, 1, 2, 3, 4)):
        found |= torch.isclose(tensors[2][0], sum(before[j] for j in others) / len(others), atol=1e-6)
    assert found.all()  # every value is the mean of those who delivered it
    await swarm.close()
