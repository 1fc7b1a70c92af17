"""What users can do with Optimizer, they can do with DiLoCo: options that both have, and who may watch and join."""

from __future__ import annotations

import inspect
import math
import re
import time

import pytest
import torch

from shoal import DHT, DiLoCo, Optimizer
from shoal.access.tokens import Token, roles_named
from shoal.averaging import TrimmedMean
from shoal.monitor.observer import Monitor
from tests.optim.conftest import backward, in_parallel, make_model, values, wait_until
from tests.optim.diloco.test_diloco import Trainer, check_same, introduce, train_until_all_agree

OPTIONS = {
    "run_id": "run",
    "sync_every": 4,
    "batch_size_per_step": 8,
    "matchmaking_time": 5.0,
    "averaging_timeout": 20.0,
}

# What only the one has, because its steps are those of all peers together, and what takes its place in the other.
OF_GRADIENTS = {
    "average_opt_statistics": "share_inner_state",
    "average_state_every": "sync_every",
    "delay_grad_averaging": "fragment_sync_delay",
    "delay_optimizer_step": "fragment_sync_delay",
    "delay_state_averaging": "fragment_sync_delay",
    "grad_averager": "compression",
    "grad_averager_factory": "compression",
    "grad_compression": "compression",
    "offload_optimizer": "optimizer",  # the outer parameters are on the CPU, and inner steps are the user's own
    "peer_momentum": "outer_optimizer",
    "reuse_grad_buffers": "sync_every",  # nothing accumulates: each batch is stepped with
    "state_aggregation": "aggregation",
    "state_averaging_compression": "compression",
    "use_ext_grad_buffer": "compression",
    "use_local_updates": "sync_every",
}


@pytest.fixture
def make(closing):
    def make(dht, seed=0, **options):
        model = options.get("model") or make_model(seed)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return Trainer(closing(DiLoCo(dht=dht, optimizer=inner, **{**OPTIONS, **options})), model, seed)

    return make


def options_of(kind: type) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters)


def test_each_option_has_a_counterpart():
    own = options_of(DiLoCo)
    assert options_of(Optimizer) - own == OF_GRADIENTS.keys()
    assert set(OF_GRADIENTS.values()) <= own


def test_the_model_brings_names_and_buffers(make_dhts, make):
    trainers = []
    for seed, dht in enumerate(make_dhts(2)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        trainers.append(make(dht, seed, model=net))
    assert trainers[0].opt.inner.names[:2] == ("0.weight", "0.bias")
    introduce(*(trainer.opt for trainer in trainers))
    train_until_all_agree(*trainers)
    check_same(*trainers)
    (done,) = (trainer.opt.averager.extra for trainer in trainers[:1])
    assert done.any(), "the running means are averaged with the first fragment"


def test_a_rule_replaces_the_mean(make_dhts, make):
    """One of four is far away from the others: a trimmed mean does not see it."""
    trainers = [make(dht, aggregation=TrimmedMean(0.3), outer_optimizer=outer) for dht in make_dhts(4)]
    introduce(*(trainer.opt for trainer in trainers))
    before = values(trainers[0].model)

    def train(number: int) -> None:
        opt, model = trainers[number].opt, trainers[number].model
        while opt.local_epoch < 1:
            opt.zero_grad()
            backward(model, torch.ones(8, 6))
            if number == 3:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e4)
            opt.step()

    in_parallel(*(lambda n=n: train(n) for n in range(4)))
    assert len(trainers[0].opt.last_round.peers) == 4
    for trainer in trainers:
        with trainer.opt.use_outer_parameters():
            assert (values(trainer.model) - before).abs().max() < 1


def test_check_state_refuses_a_downloaded_state(make_dhts, make, caplog):
    """The newcomer gets its own parameters back, and trains alone until it accepts a state."""
    dhts, seen, accepts = make_dhts(2), [], []
    first = make(dhts[0])
    first.train_until(2)

    def check_state() -> bool:
        seen.append(values(newcomer.model))
        return bool(accepts)

    newcomer = make(dhts[1], seed=5, check_state=check_state)
    before = values(newcomer.model)
    introduce(first.opt, newcomer.opt)
    assert not newcomer.opt.load_state_from_peers(timeout=10)
    assert f"the state of peer {dhts[0].peer_id} is refused: check_state returned False" in caplog.text
    with first.opt.use_outer_parameters():
        assert torch.equal(seen[0], values(first.model)), "it was in place while it was looked at"
    assert torch.equal(values(newcomer.model), before)
    assert newcomer.opt.local_epoch == 0
    assert [link.version for link, _ in newcomer.opt.outer_versions()] == [0]
    accepts.append(True)
    state = first.opt.averager.get_current_state()
    newcomer.opt.load_state(state)
    assert newcomer.opt.outer_versions() == first.opt.outer_versions()


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_a_state_comes_no_faster_than_it_may(make_dhts, closing, kind):
    def start(dht, seed, **options):
        model = make_model(seed)
        training = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "target_batch_size": 8}
        return closing(kind(dht=dht, run_id="run", batch_size_per_step=8, **training, **options)), model

    dhts, seconds = make_dhts(2), 1.5
    donor, model = start(dhts[0], seed=0)
    while donor.local_epoch < 1:
        donor.zero_grad()
        backward(model, torch.ones(8, 6))
        donor.step()
    newcomer, _ = start(dhts[1], seed=5, state_download_rate=values(model).nbytes / seconds)
    began_at = time.monotonic()
    assert newcomer.load_state_from_peers(timeout=30)
    assert time.monotonic() - began_at >= seconds, "all parameters are in the state, and without a limit come at once"
    assert newcomer.local_epoch == 1


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
@pytest.mark.parametrize("rate", [0, -1e6, math.nan, "5M"])
def test_a_rate_at_which_nothing_comes_is_refused(make_dhts, kind, rate):
    (dht,) = make_dhts(1)
    training = {"optimizer": torch.optim.SGD(make_model().parameters(), lr=0.01), "target_batch_size": 8}
    wrong = re.escape(f"state_download_rate must be a number of bytes per second above 0, got {rate!r}: leave it out")
    with pytest.raises(ValueError, match=wrong):
        kind(dht=dht, run_id="run", **training, state_download_rate=rate)


def outer(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def test_a_private_run_trains_and_is_watched(closing, make):
    run = Token.new_run("secret")
    guests = [run.invite(roles_named("train"), 32_000_000_000) for _ in range(2)]
    where = ["/ip4/127.0.0.1/tcp/0"]
    first = closing(DHT(start=True, host_maddrs=where, token=guests[0].text))
    second = closing(DHT(start=True, host_maddrs=where, token=guests[1].text, initial_peers=first.get_visible_maddrs()))
    trainers = [make(dht) for dht in (first, second)]
    introduce(*(trainer.opt for trainer in trainers))
    train_until_all_agree(*trainers)
    trainers[0].opt.report(loss=2.5)
    with Monitor(second, "run") as monitor:
        wait_until(lambda: monitor.view.summary and monitor.view.summary.reporting, "the report is seen")
