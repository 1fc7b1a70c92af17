"""When a stage steps, what its optimizer refuses, and clipping by the norm of all stages."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from shoal.errors import BusyError
from shoal.stages.steps import DeclaredEnd, StageNorms, make_optimizer, squared_norm
from shoal.testing import Link, Network, run
from shoal.testing.averagers import SharedTable
from tests.simulation.trackers import Tracked, start_trackers, train


@pytest.mark.parametrize("seed", range(3))
def test_epoch_ends_when_one_peer_declares_it_over(seed):
    """Not when the target is reached: samples may count twice, or be lost with a peer."""

    async def main() -> None:
        peers = await start_trackers(Network(Link(delay=(0.05, 0.1), jitter=0.01)), 4, SharedTable())
        for each in peers:
            each.board.rule = DeclaredEnd()
            each.board.set_target(8)
        await train(peers, 20)
        assert all(each.board.global_progress(each.host.dht_time()).samples_accumulated > 40 for each in peers)
        assert not any(map(is_over, peers))
        first = peers[0]
        first.board.rule.declare_over(0)
        assert [*map(is_over, peers)] == [True, False, False, False]
        first.board.begin_update(first.host.dht_time(), patience=15.0)
        first.exchange.call_due.set()
        await asyncio.sleep(0.3)
        assert all(map(is_over, peers)), "a call later all of them know it"
        assert all(each.expected == 4 for each in peers)
        for each in peers:
            go_to(each, 1)
        await asyncio.sleep(0.3)
        assert not any(map(is_over, peers)), "the next epoch is not over with it"
        go_to(first, 2)
        await asyncio.sleep(0.3)
        assert [*map(is_over, peers)] == [False, True, True, True], "peers that are behind do not wait"
        for each in peers:
            await each.exchange.stop()

    run(main(), seed=seed)


def is_over(peer: Tracked) -> bool:
    now = peer.host.dht_time()
    return peer.board.end_of_epoch(now) <= now


def go_to(peer: Tracked, epoch: int) -> None:
    peer.board.finish_update(epoch, [], peer.host.dht_time())
    peer.exchange.call_due.set()


async def test_silent_stage_counts_with_its_last_norm(caplog):
    answers = {(1, 0): 4.0, (2, 0): 9.0, (1, 1): 16.0, (1, 2): math.nan}

    async def ask(stage: int, step: int) -> float:
        if (stage, step) not in answers:
            raise BusyError("it is busy")
        return answers[stage, step]

    norms = StageNorms(0, 3, ask, 5.0)
    early = asyncio.ensure_future(norms.own(0))
    sums = [await asyncio.to_thread(norms.gather, step, 1.0) for step in range(3)]
    assert sums == [1 + 4 + 9, 1 + 16 + 9, 1 + 16 + 9]
    assert await early == await norms.own(2) == 1.0
    late = asyncio.ensure_future(norms.own(3))
    await asyncio.sleep(0)
    norms.settle(4)  # after a download
    for step in (3, 4):
        with pytest.raises(BusyError, match=f"this peer has not made step {step}"):
            await (late if step == 3 else norms.own(4))
    assert await norms.own(2) == 1.0
    assert [record.getMessage() for record in caplog.records] == [
        f"stage {stage} did not tell the norm of its gradients ({why}): its last one counts for clipping. If this "
        "goes on, it needs faster peers"
        for stage, why in [(2, "it is busy"), (1, "got nan")]
    ]


def test_norm_of_many_tensors_is_exact():
    tensors = [torch.randn(100, 7), torch.tensor(3.0), torch.zeros(0), torch.full((5,), 1e4, dtype=torch.bfloat16)]
    assert squared_norm([]) == 0.0
    assert squared_norm(tensors) == pytest.approx(sum(float(each.double().square().sum()) for each in tensors), 1e-6)


@pytest.mark.parametrize("option", [{"reuse_grad_buffers": True}, {"use_local_updates": True}, {"sync_every": 5}])
def test_options_that_stages_set_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} cannot be given for a stage: "):
        make_optimizer(None, "run", 0, torch.nn.Linear(2, 2), optimizer=torch.optim.SGD, target_batch_size=1, **option)


def test_stage_without_parameters_needs_no_optimizer():
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    assert make_optimizer(None, "run", 0, frozen, optimizer=torch.optim.SGD, target_batch_size=1) is None
