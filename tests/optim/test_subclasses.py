"""Programs that derive their own optimizers from ``Optimizer``, with their own trackers and averagers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shoal as hivemind
from shoal.averaging import DecentralizedAverager
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from shoal.optim.state_averager import TrainingStateAverager
from tests.optim.conftest import (
    Trainer,
    backward,
    check_identical,
    in_parallel,
    make_model,
    meet,
    sgd,
    values,
    wait_until,
)

# --- a program that trains with many local steps and an outer optimizer -----------------------------------------------


class LocalSteps(ProgressTracker):
    """Its epoch is over after so many steps of its own, or when others have ended it."""

    def __init__(self, *, batch_size: int, **kwargs: Any) -> None:
        self.batch_size = batch_size
        super().__init__(**kwargs)

    @property
    def ready_to_update_epoch(self) -> bool:
        own = self.local_progress
        return self.global_epoch > own.epoch or own.samples_accumulated >= self.target_batch_size

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        now, own = hivemind.get_dht_time(), self.local_progress
        if not isinstance(metadata, dict) or len(metadata) == 0:
            left = max(0, self.target_batch_size - own.samples_accumulated) / self.performance_ema.samples_per_second
            return GlobalTrainingProgress(
                own.epoch,
                own.samples_accumulated,
                self.target_batch_size,
                num_peers=0,
                num_clients=0,
                eta_next_epoch=now + left,
                next_fetch_time=now + self.default_refresh_period,
            )
        peers = [LocalTrainingProgress.parse_obj(peer.value) for peer in metadata.values() if peer.value is not None]
        epoch = max([own.epoch, *(peer.epoch for peer in peers if not peer.client_mode)])
        left = [
            (self.target_batch_size - peer.samples_accumulated) / max(peer.samples_per_second, 1e-3)
            for peer in peers
            if peer.epoch == epoch
        ]
        eta = max([0.0, *left])
        more_peers = max(len(peers) + self.expected_drift_peers, len(peers) * (1 + self.expected_drift_rate))
        pause = min(max(eta * len(peers) / more_peers, self.min_refresh_period), self.max_refresh_period)
        return GlobalTrainingProgress(
            epoch,
            sum(peer.samples_accumulated for peer in peers if peer.epoch == epoch),
            self.target_batch_size,
            num_peers=len(peers),
            num_clients=sum(peer.client_mode for peer in peers),
            eta_next_epoch=now + eta,
            next_fetch_time=now + pause,
        )


class OuterSteps(TrainingStateAverager):
    """Beside the outer optimizer, which steps copies of the parameters, it has the inner one."""

    def __init__(self, *, inner_optimizer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner_optimizer = inner_optimizer(self.main_parameters)

    @property
    def outer_parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


class PseudoGradients(DecentralizedAverager):
    """Averages how far the parameters have moved, right where the outer optimizer reads its gradients."""

    def __init__(self, state_averager: OuterSteps, *, dht: hivemind.DHT, prefix: str, **kwargs: Any) -> None:
        self.main, self.outer = state_averager.main_parameters, state_averager.outer_parameters
        for parameter in self.outer:
            parameter.grad = torch.zeros_like(parameter)
        super().__init__([parameter.grad for parameter in self.outer], dht, prefix=prefix, **kwargs)

    def average(self, timeout: float) -> Any:
        with self.get_tensors() as grads:
            for grad, outer, main in zip(grads, self.outer, self.main, strict=True):
                grad.copy_(outer.detach() - main.detach())
        return self.step(wait=True, timeout=timeout)


class LocalOptimizer(hivemind.Optimizer):
    """Steps with local gradients, and after so many steps makes an outer step together with others."""

    def __init__(self, *, num_inner_steps: int, batch_size: int, inner_optimizer: Any, **kwargs: Any) -> None:
        self.inner_optimizer = inner_optimizer
        self.loads = 0
        super().__init__(
            target_batch_size=num_inner_steps * batch_size,
            batch_size_per_step=batch_size,
            use_local_updates=True,
            offload_optimizer=True,
            delay_optimizer_step=False,
            delay_state_averaging=False,
            **kwargs,
        )
        self.pseudo_gradients = PseudoGradients(
            self.state_averager,
            dht=self.dht,
            prefix=f"{self.run_id}_grad_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            target_group_size=2,
            start=True,
        )

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> ProgressTracker:
        return LocalSteps(
            dht=self.dht,
            prefix=self.run_id,
            target_batch_size=target_batch_size,
            batch_size=self.batch_size_per_step,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **kwargs,
        )

    def _make_state_averager(self, **kwargs: Any) -> TrainingStateAverager:
        return OuterSteps(
            dht=self.dht,
            prefix=f"{self.run_id}_state_averager",
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            offload_optimizer=self.offload_optimizer,
            custom_gradients=self.offload_optimizer,
            status_loglevel=self.status_loglevel,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            start=True,
            inner_optimizer=self.inner_optimizer,
            **kwargs,
        )

    def step(self, closure: Any = None, batch_size: Any = None, grad_scaler: Any = None) -> None:
        if self._should_load_state_from_peers():
            self.loads += 1
            self.load_state_from_peers()
            return
        samples = self.tracker.local_progress.samples_accumulated + self.batch_size_per_step
        self.tracker.report_local_progress(self.local_epoch, samples)
        self.state_averager.inner_optimizer.step()
        if self.tracker.ready_to_update_epoch:
            self._update_global_epoch(grad_scaler)

    def _update_global_epoch(self, grad_scaler: Any = None) -> None:
        assert self._schema_hash == self._compute_schema_hash(), "parameters changed"
        with self.tracker.pause_updates():
            if self.tracker.global_progress.num_peers > 1:
                self.pseudo_gradients.average(self.averaging_timeout)
            self.state_averager.step(increment_epoch=True, optimizer_step=True)
            self.tracker.update_epoch(new_epoch=self.state_averager.local_epoch)
            if not self.client_mode:
                self.state_averager.state_sharing_priority = self.local_epoch

    def shutdown(self) -> None:
        super().shutdown()
        self.pseudo_gradients.shutdown()


def test_a_subclass_with_its_own_parts(make_dhts, closing):
    steps, peers = 4, []
    for dht in make_dhts(2):
        model = make_model()
        opt = LocalOptimizer(
            dht=dht,
            run_id="run",
            num_inner_steps=steps,
            batch_size=8,
            inner_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.7, momentum=0.9, nesterov=True),
            params=model.parameters(),
            matchmaking_time=10.0,
            averaging_timeout=20.0,
        )
        peers.append((closing(opt), model))
    assert all(opt.is_alive() and opt.tracker.is_alive() and opt.state_averager.is_alive() for opt, _ in peers)
    for opt, model in peers:  # they meet: from now on each waits for the other
        backward(model, torch.randn(8, 6))
        opt.step()
    for opt, _ in peers:
        wait_until(lambda opt=opt: opt.tracker.global_progress.num_peers == 2, "the peers have met")

    def train(opt: LocalOptimizer, model: torch.nn.Module) -> None:
        while opt.local_epoch < 3:
            opt.zero_grad()
            backward(model, torch.randn(8, 6))
            opt.step()

    in_parallel(*(lambda opt=opt, model=model: train(opt, model) for opt, model in peers))
    (first, model), (second, other) = peers
    assert torch.equal(values(model), values(other)), "each outer step had the mean of both pseudo gradients"
    assert not torch.equal(values(model), values(make_model()))
    assert first.loads == second.loads == 0
    assert first.local_epoch == second.local_epoch == 3
    assert len(first.pseudo_gradients.last_round.peers) == 2


# --- a program that only notes, and leaves the work to the class ------------------------------------------------------


class Noting(hivemind.Optimizer):
    """Makes its parts itself, started, and notes what is called."""

    def __init__(self, **kwargs: Any) -> None:
        self.called: list[str] = []
        super().__init__(**kwargs)

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> ProgressTracker:
        self.called.append("tracker")
        return super()._make_progress_tracker(target_batch_size, **{**kwargs, "start": True})

    def _make_state_averager(self, **kwargs: Any) -> TrainingStateAverager:
        self.called.append("state averager")
        return super()._make_state_averager(**{**kwargs, "start": True})

    def _make_gradient_averager(self, factory: Any, **kwargs: Any) -> GradientAverager:
        self.called.append("gradient averager")
        return GradientAverager(
            dht=self.dht,
            prefix=f"{self.run_id}_grad_averager",
            parameters=self.state_averager.main_parameters,
            min_matchmaking_time=self.matchmaking_time,
            allreduce_timeout=self.allreduce_timeout,
            shutdown_timeout=self.shutdown_timeout,
            next_chunk_timeout=self.next_chunk_timeout,
            client_mode=self.client_mode,
            auxiliary=self.auxiliary,
            start=True,
            **kwargs,
        )

    def _should_load_state_from_peers(self) -> bool:
        self.called.append("should load")
        return super()._should_load_state_from_peers()

    def _maybe_schedule_gradient_averaging(self) -> None:
        self.called.append("gradients")
        super()._maybe_schedule_gradient_averaging()

    def _maybe_schedule_state_averaging(self) -> None:
        self.called.append("state")
        super()._maybe_schedule_state_averaging()

    def _update_global_epoch(self, grad_scaler: Any = None) -> None:
        self.called.append("update")
        super()._update_global_epoch(grad_scaler)


def make_noting(dht: hivemind.DHT, model: torch.nn.Module, **options: Any) -> Noting:
    defaults = {"target_batch_size": 32, "matchmaking_time": 10.0, "averaging_timeout": 20.0}
    return Noting(dht=dht, run_id="run", **{"optimizer": sgd(model.parameters()), **defaults, **options})


def test_a_subclass_trains_with_an_ordinary_peer(make_dhts, closing, make_trainers):
    first_dht, second_dht = make_dhts(2)
    model, other = make_model(), make_model()
    opt = closing(make_noting(first_dht, model, target_batch_size=64))
    plain = closing(
        hivemind.Optimizer(
            dht=second_dht,
            run_id="run",
            optimizer=sgd(other.parameters()),
            target_batch_size=64,
            matchmaking_time=10.0,
            averaging_timeout=20.0,
        )
    )
    trainers = [Trainer(opt, model), Trainer(plain, other, seed=2)]
    assert opt.called == ["tracker", "state averager", "gradient averager"]
    meet(*trainers)
    in_parallel(*(lambda t=t: t.train_until(2) for t in trainers))
    check_identical(trainers)
    assert len(opt.grad_averager.last_round.peers) == 2
    assert {"should load", "gradients", "state", "update"} <= set(opt.called)
    # Settings are compared although the tracker was started before they were known.
    assert opt._company.knows(second_dht.peer_id.to_bytes())
    assert plain._company.knows(first_dht.peer_id.to_bytes())


def test_a_subclass_may_have_frozen_parameters(make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model()
    model[0].bias.requires_grad_(False)
    groups = {"optimizer": sgd, "params": list(model.parameters())}
    opt = closing(make_noting(dht, model, **groups))
    assert opt.offload_optimizer
    stepped = dict(zip(map(id, model.parameters()), opt.state_averager.optimizer_parameters, strict=True))
    for parameter, grad in zip(opt.grad_averager.parameters, opt.grad_averager.averaged_grads, strict=True):
        assert stepped[id(parameter)].grad is grad


def test_a_subclass_may_skip_the_step(make_dhts, closing):
    """The methods are the way that the step takes, so overriding one changes it."""

    class Reluctant(Noting):
        def _update_global_epoch(self, grad_scaler: Any = None) -> None:
            self.called.append("declined")

    (dht,) = make_dhts(1)
    model = make_model()
    opt = closing(
        Reluctant(dht=dht, run_id="run", target_batch_size=8, optimizer=sgd(model.parameters()), matchmaking_time=1.0)
    )
    backward(model, torch.randn(8, 6))
    opt.step(batch_size=8)
    assert "declined" in opt.called
    assert opt.local_epoch == 0


def test_the_schema_hash_changes_with_the_parameters(make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model()
    opt = closing(make_noting(dht, model))
    before = opt._compute_schema_hash()
    assert opt._compute_schema_hash() == before == opt._schema_hash
    opt.opt.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(8, 6))
    assert opt._compute_schema_hash() != before


class Doubled(ProgressTracker):
    """Counts every sample twice."""

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        usual = super()._parse_swarm_progress_data(metadata)
        return replace(usual, samples_accumulated=2 * usual.samples_accumulated)


def test_a_derived_tracker_decides_the_epochs_end(make_dhts, closing):
    (dht,) = make_dhts(1)
    tracker = closing(Doubled(dht, "run", 100, start=True))
    tracker.report_local_progress(0, 40)
    wait_until(lambda: tracker.board.introduced, "the tracker has looked for others")
    assert tracker.global_progress.samples_accumulated == 80
    assert not tracker.ready_to_update_epoch
    tracker.report_local_progress(0, 50)
    assert tracker.global_progress.samples_accumulated == 100
    assert tracker.ready_to_update_epoch


def test_records_in_a_tracker_are_plain_values(make_dhts, closing):
    seen: list[dict[bytes, Any]] = []

    class Reading(ProgressTracker):
        def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
            seen.append(dict(metadata))
            return super()._parse_swarm_progress_data(metadata)

    first, second = make_dhts(2)
    tracker = closing(Reading(first, "run", 1000, start=True))
    other = closing(ProgressTracker(second, "run", 1000, start=True))
    tracker.report_local_progress(0, 40)
    other.report_local_progress(0, 60)
    wait_until(lambda: tracker.global_progress.num_peers == 2, "the peers have met")
    records = {peer: LocalTrainingProgress.parse_obj(item.value) for peer, item in seen[-1].items()}
    assert {peer: record.samples_accumulated for peer, record in records.items()} == {
        first.peer_id.to_bytes(): 40,
        second.peer_id.to_bytes(): 60,
    }
    assert all(item.expiration_time > hivemind.get_dht_time() for item in seen[-1].values())
    assert records[second.peer_id.to_bytes()].dict()["epoch"] == 0


def test_a_record_that_makes_no_sense_is_refused():
    good = LocalTrainingProgress(b"\0\x20" + bytes(32), 1, 2, 3.0, 4.0, False)
    assert LocalTrainingProgress.parse_obj(good.dict()) == good
    with pytest.raises(ValueError, match="epoch"):
        LocalTrainingProgress.parse_obj({**good.dict(), "epoch": -1})


@pytest.mark.parametrize("starts_at_once", [True, False])
def test_a_tracker_can_be_started_twice(make_dhts, closing, starts_at_once):
    (dht,) = make_dhts(1)
    tracker = closing(ProgressTracker(dht, "run", 100, start=starts_at_once))
    tracker.run_in_background()
    tracker.run_in_background()
    assert tracker.is_alive()


def test_the_options_of_an_optimizer_are_its_attributes(make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model()
    options = {
        "allreduce_timeout": 17.0,
        "average_state_every": 3,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
        "delay_state_averaging": True,
        "load_state_timeout": 123.0,
        "next_chunk_timeout": 4.0,
        "offload_optimizer": True,
        "shutdown_timeout": 7.0,
        "load_state_compression": hivemind.Float16Compression(),
    }
    groups = {"optimizer": sgd, "params": list(model.parameters())}
    own = {"averager_opts": {"declare_state_period": 11.0}, "tracker_opts": {"expected_drift_rate": 0.5}}
    opt = closing(make_noting(dht, model, **groups, **options, **own))
    codec = options.pop("load_state_compression")
    assert {name: getattr(opt, name) for name in options} == options
    assert opt.state_averager.state_compression is codec
    for averager in opt.state_averager, opt.grad_averager:
        assert averager.next_chunk_timeout == 4.0
        assert averager.declare_state_period == 11.0
    tracker = opt.tracker
    assert (tracker.min_refresh_period, tracker.max_refresh_period, tracker.default_refresh_period) == (0.5, 10, 3)
    assert (tracker.expected_drift_peers, tracker.expected_drift_rate) == (3, 0.5)
    assert tracker.training_progress_key == "run_progress"
    assert tracker.global_state_updated is tracker.fetched_global_progress_this_epoch
    assert not tracker.should_report_progress.is_set()
    assert isinstance(dht.num_workers, int)


def test_default_options_are_shown_as_resolved(make_dhts, closing):
    (dht,) = make_dhts(1)
    opt = closing(make_noting(dht, make_model(), matchmaking_time=10.0, averaging_timeout=60.0))
    assert opt.allreduce_timeout == 60.0
    assert opt.next_chunk_timeout == opt.state_averager.next_chunk_timeout == 15.0
    assert (opt.delay_optimizer_step, opt.offload_optimizer, opt.average_state_every) == (False, False, 1)
