"""Averaging a model whenever the training loop says so."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.averaging.state.download import layout_of
from shoal.optim import TrainingAverager
from tests.optim.conftest import in_parallel, wait_until

pytestmark = pytest.mark.devices


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 3)


@pytest.fixture
def make_averagers(make_dhts, closing):
    def make(count: int, **options) -> list[TrainingAverager]:
        averagers = []
        for index, dht in enumerate(make_dhts(count)):
            opt = torch.optim.Adam(make_model(index).parameters(), lr=0.1)
            defaults = {"average_parameters": True, "average_gradients": False, "prefix": "training", "start": True}
            averagers.append(closing(TrainingAverager(opt, dht=dht, **{**defaults, **options})))
        return averagers

    return make


def parameters(averager: TrainingAverager) -> list[torch.Tensor]:
    return averager.opt.param_groups[0]["params"]


def train(averager: TrainingAverager, seed: int) -> None:
    averager.opt.zero_grad()
    for parameter in parameters(averager):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    averager.opt.step()


def run_round(averagers: list[TrainingAverager], **options) -> list:
    options = {"expected_group_size": len(averagers), "timeout": 50, **options}
    return in_parallel(*(lambda a=a: a.step(**options) for a in averagers))


def test_states_of_other_tensors_are_not_downloaded(make_averagers):
    averager = make_averagers(1, average_opt_statistics=["exp_avg"], extra_tensors=[torch.zeros(2)])[0]
    assert averager._expected_layout() == layout_of(averager.get_current_state().tensors)
    train(averager, 0)
    assert averager._expected_layout() == layout_of(averager.get_current_state().tensors)


def test_a_subclass_decides_itself_what_a_state_is(make_dhts, closing):
    class Own(TrainingAverager):
        def get_current_state(self):
            return {"step": 1}, [torch.zeros(5)]

    opt = torch.optim.SGD(make_model(0).parameters(), lr=0.1)
    own = closing(
        Own(opt, average_parameters=True, average_gradients=False, dht=make_dhts(1)[0], prefix="training", start=True)
    )
    assert own._expected_layout() is None, "tensors of any shape may be of use to it"


def test_everything_chosen_is_averaged_by_weight(make_averagers):
    averagers = make_averagers(2, average_gradients=True, average_opt_statistics=["exp_avg"])
    for index, averager in enumerate(averagers):
        train(averager, index)
    local = [[tensor.detach().clone() for tensor in averager.local_tensors()] for averager in averagers]
    assert len(local[0]) == 6
    results = in_parallel(
        *(
            lambda a=a, w=w: a.step(weight=w, gather=w, expected_group_size=2, timeout=50)
            for a, w in zip(averagers, (1.0, 3.0), strict=True)
        )
    )
    for averager, result in zip(averagers, results, strict=True):
        assert sorted(result.values()) == [1.0, 3.0]
        assert averager.local_step == 1
        for found, a, b in zip(averager.local_tensors(), *local, strict=True):
            torch.testing.assert_close(found.detach(), (a + 3 * b) / 4)


def test_extra_tensors_and_half_precision(make_averagers, make_dhts, closing):
    averagers, extras = [], [torch.full((2,), float(i), dtype=torch.float16) for i in (1, 2)]
    for dht, extra in zip(make_dhts(2), extras, strict=True):
        opt = torch.optim.SGD(make_model(0).parameters(), lr=0.1)
        options = {"average_parameters": False, "average_gradients": False, "extra_tensors": [extra]}
        averagers.append(closing(TrainingAverager(opt, dht=dht, prefix="extra", start=True, **options)))
    run_round(averagers)
    assert [extra.tolist() for extra in extras] == [[1.5, 1.5]] * 2
    assert extras[0].dtype == torch.float16


def test_a_failed_round_leaves_the_model_alone(make_averagers, caplog):
    (averager,) = make_averagers(1, min_matchmaking_time=0.2, request_timeout=0.1)
    before = [parameter.detach().clone() for parameter in parameters(averager)]
    assert averager.step(timeout=0.5) is None
    assert averager.local_step == 1
    assert "not averaged" in caplog.text
    assert all(torch.equal(p, b) for p, b in zip(parameters(averager), before, strict=True))


def test_training_goes_on_meanwhile(make_averagers):
    """With a lock, what changes between reading and writing survives; without waiting, in the background."""
    averagers = make_averagers(2)
    before = [[p.detach().clone() for p in parameters(a)] for a in averagers]
    locks = [threading.Lock() for _ in averagers]
    futures = [averagers[0].step(locks[0], wait=False, expected_group_size=2, timeout=50)]
    wait_until(averagers[0]._step_lock.locked, "the step has begun")
    with locks[0], torch.no_grad():
        for parameter in parameters(averagers[0]):
            parameter += 10
    late_or_early = [(p - b).mean().item() for p, b in zip(parameters(averagers[0]), before[0], strict=True)]
    assert late_or_early == pytest.approx([10, 10])
    futures.append(averagers[1].step(locks[1], wait=False, expected_group_size=2, timeout=50))
    for future in futures:
        assert len(future.result(50)) == 2
    for mine, other, a, b in zip(parameters(averagers[0]), parameters(averagers[1]), *before, strict=True):
        read = a if torch.allclose(other, (a + b) / 2, atol=1e-3) else a + 10
        torch.testing.assert_close(other.detach(), (read + b) / 2)
        torch.testing.assert_close(mine.detach(), (read + b) / 2 + (a + 10 - read))


def test_a_newcomer_takes_over_the_state(make_averagers):
    averagers = make_averagers(2)
    for number in range(3):
        for averager in averagers:
            train(averager, number)
        run_round(averagers)
    (newcomer,) = make_averagers(1)
    assert newcomer.load_state_from_peers(timeout=50) is True
    assert newcomer.local_step == 3
    donor = averagers[0]
    for mine, theirs in zip(parameters(newcomer), parameters(donor), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(newcomer.opt.state[mine]["exp_avg"], donor.opt.state[theirs]["exp_avg"])
    (first,) = make_averagers(1, prefix="another")
    assert first.load_state_from_peers(wait=False, timeout=50).result(50) is False


def test_arguments_are_checked(make_averagers):
    with pytest.raises(ValueError, match="nothing"):
        make_averagers(1, average_parameters=False)
    with pytest.raises(ValueError, match="exp_nothing"):
        make_averagers(1, average_opt_statistics=["exp_nothing"])
