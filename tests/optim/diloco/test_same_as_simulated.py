"""Real peers make what one process makes that plays all of them, and with one step what all samples make."""

from __future__ import annotations

import functools

import pytest
import torch

from shoal.compression import NoCompression
from shoal.optim.diloco.diloco import DiLoCo
from tests.optim.conftest import backward, in_parallel, make_model, values
from tests.optim.diloco.test_diloco import introduce

pytestmark = pytest.mark.timeout(240)
PATIENT = {"matchmaking_time": 60.0, "averaging_timeout": 120.0, "straggler_patience": 100.0}


def batch_of(peer, step, size):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(1000 * peer + step))


def simulate(sizes, steps, every, inner, outer, schedule=None):
    """Play all peers; returns the outer parameters after each exchange.

    Args:
        sizes: of the batches of each peer.
        schedule: makes a schedule of an inner optimizer; it counts inner steps.
    """
    models = [make_model() for _ in sizes]
    inners = [inner(model.parameters()) for model in models]
    schedules = [] if schedule is None else [schedule(each) for each in inners]
    parameter = torch.nn.Parameter(values(models[0]))
    optimizer, seen = outer([parameter]), []
    for step in range(steps):
        for peer, (model, each, size) in enumerate(zip(models, inners, sizes, strict=True)):
            each.zero_grad()
            backward(model, batch_of(peer, step, size))
            each.step()
        for each in schedules:
            each.step()
        if (step + 1) % every == 0:
            moved = sum(size * (parameter.detach() - values(model)) for size, model in zip(sizes, models, strict=True))
            parameter.grad = moved / sum(sizes)
            optimizer.step()
            seen.append(parameter.detach().clone())
            for model in models:
                torch.nn.utils.vector_to_parameters(parameter.detach().clone(), model.parameters())
    return seen


class Real:
    def __init__(self, dht, number, size, inner, **options):
        self.number, self.size, self.steps, self.model = number, size, 0, make_model()
        defaults = {"run_id": "run", "compression": NoCompression(), **PATIENT}
        optimizer = inner(self.model.parameters())
        self.opt = DiLoCo(dht=dht, optimizer=optimizer, batch_size_per_step=size, **{**defaults, **options})

    def step(self):
        self.opt.zero_grad()
        backward(self.model, batch_of(self.number, self.steps, self.size))
        self.opt.step()
        self.steps += 1


@pytest.fixture
def make_real(make_dhts, closing):
    def make(sizes, inner, **options):
        dhts = make_dhts(len(sizes))
        peers = [Real(dht, n, size, inner, **options) for n, (dht, size) in enumerate(zip(dhts, sizes, strict=True))]
        for peer in peers:
            closing(peer.opt)
        introduce(*(peer.opt for peer in peers))
        return peers

    return make


@pytest.mark.slow
def test_fifty_rounds_of_three_peers(make_real):
    sizes, every, rounds = [8, 8, 4], 2, 50
    inner = functools.partial(torch.optim.AdamW, lr=0.01)
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    expected = simulate(sizes, rounds * every, every, inner, outer)
    peers = make_real(sizes, inner, sync_every=every)
    for number in range(rounds):
        for _ in range(every):
            in_parallel(*(peer.step for peer in peers))
        for peer in peers:
            assert len(peer.opt.last_round.peers) == 3
            assert torch.equal(values(peer.model), values(peers[0].model))
        torch.testing.assert_close(values(peers[0].model), expected[number], rtol=1e-5, atol=2e-6)


def test_one_step_equals_a_large_batch(make_real):
    sizes, rate = [8, 4], 0.3
    plain = functools.partial(torch.optim.SGD, lr=1.0)
    peers = make_real(sizes, functools.partial(torch.optim.SGD, lr=rate), sync_every=1, outer_optimizer=plain)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, torch.cat([batch_of(peer, step, size) for peer, size in enumerate(sizes)]))
        optimizer.step()
        in_parallel(*(peer.step for peer in peers))
        for peer in peers:
            torch.testing.assert_close(values(peer.model), values(model), rtol=1e-6, atol=1e-6)
