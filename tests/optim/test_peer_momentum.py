"""Peers that send their momentum, and robust rules as options of Optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.averaging import ClipToMedianNorm, TrimmedMean
from shoal.base.clock import get_dht_time
from shoal.errors import AveragingError
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager, PeerMomentum, check_has_no_momentum
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import Trainer, backward, check_identical, in_parallel, make_model, meet, values

PLAIN = GradientAverager.get_factory()


def sgd_without(groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def test_the_momentum_by_hand():
    momentum, gradients = PeerMomentum(0.5, [torch.zeros(2)]), [torch.zeros(2)]
    for batches, gradient, expected in [(1, 4.0, 4.0), (3, 0.0, 2.0), (1, 8.0, 5.0)]:
        for _ in range(2):  # the same gradient counts once
            gradients[0].fill_(gradient)
            momentum.replace(gradients, batches)
            assert gradients[0].tolist() == [expected] * 2
        momentum.next_step()
    gradients[0].fill_(8.0)
    momentum.replace(gradients, 1)
    assert gradients[0].tolist() == [6.5] * 2
    gradients[0].fill_(10.5)
    momentum.replace(gradients, 2)
    assert gradients[0].tolist() == [8.5] * 2, "with more batches it is another gradient"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_missing_and_infinite_momentum_does_not_count(bad):
    momentum, gradients = PeerMomentum(0.5, [torch.zeros(2)]), [torch.full((2,), 4.0)]
    momentum.replace(gradients, 1)
    momentum.next_step()
    gradients[0][1] = bad
    momentum.replace(gradients, 1)
    assert gradients[0].isfinite().tolist() == [True, False], "others must hear of it"
    gradients[0].zero_()
    momentum.replace(gradients, 0)
    assert gradients[0].tolist() == [0, 0]
    assert momentum.tensors[0].tolist() == [4, 4]


OWN = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
}
NONE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "Adam": lambda p: torch.optim.Adam(p, betas=(0.0, 0.99)),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.parametrize("name", OWN)
def test_optimizers_with_momentum_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must have none of its own, but its \S+ is 0.*set it to 0"):
        check_has_no_momentum(OWN[name]([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("name", NONE)
def test_optimizers_without_are_taken(name):
    check_has_no_momentum(NONE[name]([torch.nn.Parameter(torch.zeros(1))]))


# --- averagers --------------------------------------------------------------------------------------------------------


def make_averagers(make_dhts, closing, count, **options) -> list[GradientAverager]:
    options = {"prefix": "grads", "min_matchmaking_time": 30.0, "start": True, "peer_momentum": 0.5, **options}
    return [
        closing(GradientAverager([torch.nn.Parameter(torch.zeros(5))], dht=dht, **options)) for dht in make_dhts(count)
    ]


@pytest.mark.parametrize("reuse_grad_buffers", [False, True])
def test_peers_average_their_momentum_by_samples(make_dhts, closing, reuse_grad_buffers):
    averagers = make_averagers(make_dhts, closing, 2, reuse_grad_buffers=reuse_grad_buffers)
    for gradients, expected in [((4.0, 1.0), (4 + 3 * 1) / 4), ((0.0, 5.0), (2 + 3 * 3) / 4)]:
        for averager, gradient, samples in zip(averagers, gradients, (2, 6), strict=True):
            (averager.parameters[0].sum() * gradient).backward()
            averager.accumulate_grads_(samples)
            if not reuse_grad_buffers:
                averager.parameters[0].grad = None
        options = {"scheduled_time": get_dht_time() + 30.0, "expected_group_size": 2}
        in_parallel(*(lambda a=a, o=options: a.step(**o) for a in averagers))
        for averager in averagers:
            with averager.use_averaged_gradients():
                torch.testing.assert_close(averager.parameters[0].grad, torch.full((5,), expected))


def test_after_a_failure_momentum_counts_once(make_dhts, closing):
    (averager,) = make_averagers(make_dhts, closing, 1, min_matchmaking_time=0.1, request_timeout=0.05)
    for gradient, expected in [(4.0, 4.0), (0.0, 2.0)]:
        averager.parameters[0].grad = torch.full((5,), gradient)
        averager.accumulate_grads_(1)
        for _ in range(2):
            with pytest.raises(AveragingError, match="group"):
                averager.step(timeout=0.3, reset_accumulators=False)
            assert averager.own_mean()[0].tolist() == [expected] * 5
            with averager.use_averaged_gradients():
                assert averager.parameters[0].grad.tolist() == [expected] * 5
        averager.reset_accumulated_grads_()


def test_all_peers_of_a_group_send_the_same(make_dhts, closing):
    for peer_momentum, dht in zip((0.0, 0.9), make_dhts(2), strict=True):
        averager = closing(GradientAverager([torch.nn.Parameter(torch.zeros(5))], dht=dht, prefix="p", start=False))
        assert averager.phases == "one all-reduce"
        options: dict[str, Any] = {"dht": dht, "prefix": "q", "start": False, "peer_momentum": peer_momentum}
        averager = closing(PowerSGDGradientAverager([torch.nn.Parameter(torch.zeros(5))], 1, **options))
        assert averager.phases.endswith("peer_momentum 0.9") == bool(peer_momentum)
        assert averager._config.phases == averager.phases


@pytest.mark.parametrize("beta", [1.0, -0.1, True, "0.9", float("nan")])
def test_factors_that_make_no_sense_are_refused(make_dhts, beta):
    (dht,) = make_dhts(1)
    with pytest.raises(ValueError, match="peer_momentum must be a number from 0"):
        GradientAverager([torch.nn.Parameter(torch.zeros(5))], dht=dht, prefix="p", start=False, peer_momentum=beta)


# --- Optimizer --------------------------------------------------------------------------------------------------------


def make_epochs(trainer: Trainer, count: int) -> None:
    """One batch in each."""
    for epoch in range(trainer.opt.local_epoch, trainer.opt.local_epoch + count):
        trainer.step()
        while trainer.opt.local_epoch == epoch:
            trainer.opt.step(batch_size=0)
    trainer.opt.state_averager.finish_jobs(10)


@pytest.mark.parametrize(
    "options", [{}, {"reuse_grad_buffers": True}, {"offload": True}], ids=["plain", "reused buffers", "offloaded"]
)
def test_alone_it_is_momentum_of_torch(make_trainers, options):
    """SGD that dampens its momentum takes the same mean."""
    (trainer,) = make_trainers(1, target=8, optimizer=sgd_without, grad_averager=PLAIN, peer_momentum=0.9, **options)
    model = make_model()
    reference = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
    rng = torch.Generator().manual_seed(trainer.rng.initial_seed())
    for _ in range(6):
        reference.zero_grad()
        backward(model, torch.randn(trainer.batch_size, 6, generator=rng))
        reference.step()
    make_epochs(trainer, 6)
    torch.testing.assert_close(values(trainer.model), values(model), rtol=1e-5, atol=1e-6)


def test_in_the_background_it_counts_once_too(make_trainers):
    options = {"offload": True, "delay_optimizer_step": True, "delay_grad_averaging": True, "grad_averager": PLAIN}
    trainers = make_trainers(2, optimizer=sgd_without, peer_momentum=0.9, **options)
    meet(*trainers)
    replaced = [trainer.opt.grad_averager.get_memory()[0]._version for trainer in trainers]
    epochs = trainers[0].opt.local_epoch
    in_parallel(*(lambda t=t: t.train_until(epochs + 4) for t in trainers))
    for trainer, before in zip(trainers, replaced, strict=True):
        trainer.opt.state_averager.finish_jobs(10)
        assert len(trainer.opt.grad_averager.last_round.peers) == 2
        changes = trainer.opt.grad_averager.get_memory()[0]._version - before
        assert 3 <= changes <= 5, "one change of it for each epoch"


@pytest.mark.parametrize(
    "averager", [PLAIN, PowerEFGradientAverager.get_factory(averager_rank=1, min_compression_ratio=0.0)]
)
def test_together_with_a_robust_rule(make_trainers, averager):
    rules = {"aggregation": ClipToMedianNorm(), "state_aggregation": TrimmedMean(0.3)}
    options = {"optimizer": sgd_without, "grad_averager": averager, "delay_state_averaging": False}
    trainers = make_trainers(3, peer_momentum=0.9, **rules, **options)
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(3) for t in trainers))
    check_identical(trainers)
    for trainer in trainers:
        assert len(trainer.opt.grad_averager.last_round.peers) == 3
        assert trainer.opt.grad_averager.node.config.aggregation is rules["aggregation"]
        assert trainer.opt.state_averager.node.config.aggregation is rules["state_aggregation"]


@pytest.mark.parametrize("averager", [PLAIN, PowerSGDGradientAverager.get_factory(averager_rank=1)])
def test_a_checkpoint_has_the_momentum(make_trainers, averager):
    options = {"target": 8, "optimizer": sgd_without, "grad_averager": averager, "peer_momentum": 0.9}
    (trainer,) = make_trainers(1, **options)
    make_epochs(trainer, 3)
    saved, weights = trainer.opt.state_dict(), trainer.model.state_dict()
    (resumed,) = make_trainers(1, run_id="resumed", seeds=[5], **options)
    resumed.model.load_state_dict(weights)
    resumed.opt.load_state_dict(saved)
    resumed.rng.set_state(trainer.rng.get_state())
    assert all(map(torch.equal, resumed.opt.grad_averager.get_memory(), trainer.opt.grad_averager.get_memory()))
    for each in (trainer, resumed):
        make_epochs(each, 3)
    torch.testing.assert_close(values(resumed.model), values(trainer.model))


def test_a_checkpoint_without_momentum_is_no_harm(make_trainers, caplog):
    options = {"target": 8, "optimizer": sgd_without, "grad_averager": PLAIN}
    (trainer,) = make_trainers(1, **options)
    make_epochs(trainer, 1)
    (resumed,) = make_trainers(1, run_id="resumed", peer_momentum=0.9, **options)
    resumed.opt.load_state_dict(trainer.opt.state_dict())
    assert "begins without its buffers" in caplog.text
    make_epochs(resumed, 1)
    assert resumed.opt.local_epoch == 2


def make_optimizer(dht, model, **options) -> Optimizer:
    defaults = {"run_id": "run", "target_batch_size": 8, "optimizer": sgd_without, "params": model.parameters()}
    return Optimizer(dht=dht, **{**defaults, **options})


def test_momentum_twice_is_refused_and_leaves_nothing_behind(make_dhts):
    (dht,) = make_dhts(1)
    model, before = make_model(), set(dht.node.p2p.server.handlers)
    for options in ({"peer_momentum": 0.9}, {"grad_averager": GradientAverager.get_factory(peer_momentum=0.9)}):
        with pytest.raises(ValueError, match=r"SGD must have none of its own, but its momentum is 0\.8"):
            make_optimizer(
                dht,
                model,
                optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.8),
                reuse_grad_buffers=True,
                **options,
            )
    assert set(dht.node.p2p.server.handlers) == before
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    make_optimizer(dht, model).shutdown()


@pytest.mark.parametrize("options", [{"aggregation": ClipToMedianNorm()}, {"peer_momentum": 0.9}])
def test_with_local_updates_only_parameters_are_averaged(make_dhts, closing, options):
    (dht,) = make_dhts(1)
    with pytest.raises(ValueError, match=rf"{next(iter(options))} is void.*state_aggregation"):
        make_optimizer(dht, make_model(), use_local_updates=True, **options)
    rule = TrimmedMean(0.2)
    optimizer = closing(make_optimizer(dht, make_model(), use_local_updates=True, state_aggregation=rule))
    assert optimizer.state_averager.node.config.aggregation is rule


def test_what_is_no_rule_is_refused(make_dhts):
    (dht,) = make_dhts(1)
    for name in ("aggregation", "state_aggregation"):
        with pytest.raises(TypeError, match=rf"{name} must be a rule.*with brackets"):
            make_optimizer(dht, make_model(), **{name: ClipToMedianNorm})
