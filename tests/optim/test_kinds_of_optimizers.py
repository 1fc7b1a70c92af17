"""Optimizers beyond those of torch: newcomers get all that they keep, and it survives every codec."""

from __future__ import annotations

import pytest
import torch

from shoal.compression import BlockwiseQuantization, Float16Compression, Uniform8BitQuantization
from shoal.optim.setup.optimizer_state import dump_optimizer_state, initialize_optimizer_state_, load_optimizer_state
from shoal.optim.state_averager import TrainingStateAverager
from tests.optim.conftest import in_parallel
from tests.optim.test_state_averager import OPTIONS, make_model, set_grads, values, wait_for_donor


def schedule_free(groups) -> torch.optim.Optimizer:
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(groups, lr=0.1, warmup_steps=4, weight_decay=0.1)
    optimizer.train()
    return optimizer


def prodigy(groups) -> torch.optim.Optimizer:
    return pytest.importorskip("prodigyopt").Prodigy(groups, d_coef=3.0, weight_decay=0.1, decouple=False)


class EightBitAdam(torch.optim.Optimizer):
    """Adam whose moments are codes of 8 bits, laid out as in bitsandbytes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group["lr"])

    def _step(self, parameter, state, lr):
        if not state:
            state["step"] = 0
            for number, lowest in ((1, -1.0), (2, 0.0)):
                state[f"qmap{number}"] = torch.linspace(lowest, 1, 256)
                state[f"absmax{number}"] = torch.zeros(1)
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8)
        state["step"] += 1
        moments = []
        for number, beta in ((1, 0.9), (2, 0.99)):
            before = state[f"qmap{number}"][state[f"state{number}"].long()] * state[f"absmax{number}"]
            moment = before * beta + parameter.grad**number * (1 - beta)
            moments.append(moment / (1 - beta ** state["step"]))
            state[f"absmax{number}"] = moment.abs().max().reshape(1)
            scaled = moment / state[f"absmax{number}"].clamp(min=1e-30)
            nearest = (scaled[..., None] - state[f"qmap{number}"]).abs().argmin(-1)
            state[f"state{number}"] = nearest.to(torch.uint8)
        parameter.sub_(lr * moments[0] / (moments[1].sqrt() + 1e-8))


def adam(groups) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.1, amsgrad=True)


def make_averager(make_dhts, closing, models, **options) -> list[TrainingStateAverager]:
    dhts = make_dhts(len(models))
    return [
        closing(TrainingStateAverager(dht=dht, params=model.parameters(), **OPTIONS, **options))
        for dht, model in zip(dhts, models, strict=True)
    ]


def step(averager: TrainingStateAverager, model: torch.nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.sin(torch.arange(float(parameter.numel())) + number).view_as(parameter)
    averager.step(increment_epoch=True, optimizer_step=True)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("optimizer", [schedule_free, prodigy, EightBitAdam])
def test_a_newcomer_goes_on_as_its_donor_does(make_dhts, closing, optimizer, offload):
    models = [make_model(seed) for seed in range(2)]
    donor, newcomer = make_averager(
        make_dhts, closing, models, optimizer=optimizer, offload_optimizer=offload, declare_state_period=1
    )
    for number in range(10):
        step(donor, models[0], number)
    wait_for_donor(newcomer, donor)
    assert newcomer.load_state_from_peers(timeout=50) is True
    for number in range(10, 20):
        step(donor, models[0], number)
        step(newcomer, models[1], number)
    assert all(torch.equal(a, b) for a, b in zip(*map(values, models), strict=True))


@pytest.mark.parametrize("optimizer", [schedule_free, prodigy, adam])
def test_statistics_made_in_advance_count_as_no_step(make_dhts, closing, optimizer):
    models = [make_model() for _ in range(2)]
    (averager,) = make_averager(make_dhts, closing, models[:1], optimizer=optimizer)
    alone = optimizer(models[1].parameters())
    for number in range(12):
        step(averager, models[0], number)
        for parameter in models[1].parameters():
            parameter.grad = torch.sin(torch.arange(float(parameter.numel())) + number).view_as(parameter)
        alone.step()
    assert all(torch.equal(a, b) for a, b in zip(*map(values, models), strict=True))


@pytest.mark.parametrize("codec", [Float16Compression(), BlockwiseQuantization(), Uniform8BitQuantization()])
@pytest.mark.parametrize("optimizer", [adam, EightBitAdam])
def test_statistics_survive_a_lossy_download(make_dhts, closing, optimizer, codec):
    models = [make_model(seed) for seed in range(2)]
    donor, newcomer = make_averager(
        make_dhts, closing, models, optimizer=optimizer, declare_state_period=1, state_compression=codec
    )
    for number in range(3):
        step(donor, models[0], number)
    for statistics in donor.optimizer.state.values():
        statistics["step"] += 100_002 - 3
        if "exp_avg_sq" in statistics:
            statistics["exp_avg_sq"][0] *= 1e-12
            statistics["max_exp_avg_sq"][0] *= 1e-12
            statistics["exp_avg"][0] *= 1e-6
    wait_for_donor(newcomer, donor)
    assert newcomer.load_state_from_peers(timeout=50) is True
    states = [list(averager.optimizer.state.values()) for averager in (donor, newcomer)]
    for theirs, mine in zip(*states, strict=True):
        assert float(mine["step"]) == 100_002
        for name in mine.keys() & {"state1", "state2"}:
            assert torch.equal(mine[name], theirs[name])
        for name in mine.keys() & {"exp_avg_sq", "max_exp_avg_sq", "absmax1", "absmax2"}:
            torch.testing.assert_close(mine[name].sqrt(), theirs[name].sqrt(), rtol=1 / 1024, atol=0)
    before = [values(model) for model in models]
    for averager, model in zip((donor, newcomer), models, strict=True):
        step(averager, model, 3)
    for old_first, old, first, new in zip(*before, *map(values, models), strict=True):
        torch.testing.assert_close(new - old, first - old_first, rtol=0.05, atol=0.005)


@pytest.mark.parametrize("codec", [Float16Compression(), BlockwiseQuantization(), Uniform8BitQuantization()])
def test_averages_of_statistics_are_exact(make_dhts, closing, codec):
    models = [make_model(seed) for seed in range(2)]
    names = ["step", "exp_avg", "exp_avg_sq"]
    averagers = make_averager(
        make_dhts, closing, models, optimizer=adam, compression=codec, average_opt_statistics=names
    )
    for averager, model, grad in zip(averagers, models, (1e-3, 1e-6), strict=True):
        set_grads(model, grad)
        averager.step(optimizer_step=True)
        for statistics in averager.optimizer.state.values():
            statistics["step"] += 100_001
    kept = [[{name: s[name].clone() for name in names} for s in a.optimizer.state.values()] for a in averagers]
    in_parallel(
        *(lambda a=a: a.step(averaging_round=True, averaging_opts={"expected_group_size": 2}) for a in averagers)
    )
    for averager in averagers:
        for statistics, first, second in zip(averager.optimizer.state.values(), *kept, strict=True):
            assert float(statistics["step"]) == 100_002
            for name in names:
                torch.testing.assert_close(statistics[name], (first[name] + second[name]) / 2, rtol=1e-6, atol=0)


def test_codes_are_not_averaged(make_dhts):
    (dht,) = make_dhts(1)
    optimizer = EightBitAdam(make_model().parameters())
    with pytest.raises(ValueError, match="EightBitAdam keeps 'state1' as codes, and their mean has no meaning"):
        TrainingStateAverager(dht=dht, optimizer=optimizer, average_opt_statistics=["state1"], **OPTIONS)


class Packed(torch.Tensor):
    """A tensor that is kept as codes of 8 bits and a scale, as torchao keeps statistics."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


class PackedSGD(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("momentum", Packed(torch.zeros(3, dtype=torch.uint8), torch.ones(1)))


def test_statistics_around_plain_tensors_travel_as_these():
    optimizers = [PackedSGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1) for _ in range(2)]
    for optimizer in optimizers:
        initialize_optimizer_state_(optimizer)
    (donor,), (newcomer,) = ([s["momentum"] for s in o.state.values()] for o in optimizers)
    donor.codes.copy_(torch.tensor([1, 2, 255]))
    donor.scale.fill_(0.5)
    metadata, tensors = dump_optimizer_state(optimizers[0])
    assert metadata["names"] == ["/0/momentum/codes", "/0/momentum/scale"]
    assert [tensor.dtype for tensor in tensors] == [torch.uint8, torch.float32]
    load_optimizer_state(optimizers[1], metadata, tensors)
    assert next(iter(optimizers[1].state.values()))["momentum"] is newcomer
    assert newcomer.codes.tolist() == [1, 2, 255]
    assert newcomer.scale.tolist() == [0.5]
