"""What the constructor of Optimizer accepts, refuses and makes of it."""

from __future__ import annotations

import pytest
import torch

from shoal.compression import Float16Compression, NoCompression
from shoal.optim import Optimizer
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.options import Options, with_defaults
from shoal.optim.setup.training_setup import default_silence


def make_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def sgd(groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def resolve(**options) -> Options:
    given = {"optimizer": sgd, "params": [torch.nn.Parameter(torch.zeros(1))], "run_id": "run", "target_batch_size": 8}
    return Options.resolve(**with_defaults(Optimizer, {**given, **options}))


INSTANCE = {"optimizer": sgd([torch.nn.Parameter(torch.zeros(1))]), "params": None}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"delay_grad_averaging": True, "delay_optimizer_step": False}, AssertionError, "delay_optimizer_step"),
        ({"client_mode": True, "auxiliary": True}, AssertionError, "auxiliary"),
        ({"auxiliary": True, "batch_size_per_step": 4}, AssertionError, "no batches"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(INSTANCE["optimizer"], 1)}, ValueError, "scheduler"),
        ({**INSTANCE, "offload_optimizer": True}, ValueError, "function"),
        ({**INSTANCE, "delay_optimizer_step": True}, ValueError, "function"),
        ({**INSTANCE, "delay_grad_averaging": True}, ValueError, "function"),
        ({"params": None}, ValueError, "params="),
        ({"optimizer": "sgd"}, ValueError, "instance"),
        ({"delay_optimizer_step": True, "offload_optimizer": False}, ValueError, "offload"),
        ({"use_local_updates": True, "reuse_grad_buffers": True}, AssertionError, "reuse_grad_buffers"),
        ({"use_local_updates": True, "delay_grad_averaging": True}, AssertionError, "delay_grad_averaging"),
        ({"use_local_updates": True, "grad_averager": GradientAverager}, AssertionError, "averages no gradients"),
        ({"use_local_updates": True, "use_ext_grad_buffer": True}, AssertionError, "use_ext_grad_buffer"),
        ({"grad_averager": GradientAverager, "grad_averager_factory": GradientAverager}, ValueError, "two names"),
    ],
)
def test_contradictions(options, error, text):
    with pytest.raises(error, match=text):
        resolve(**options)


def test_defaults_depend_on_each_other():
    settings = resolve()
    assert settings.offload_optimizer
    assert settings.grad_averager_factory.func is GradientAverager, "gradients are averaged exactly"
    assert resolve(grad_averager_factory=GradientAverager).grad_averager_factory is GradientAverager
    assert settings.use_ext_grad_buffer
    assert not settings.delay_optimizer_step
    assert not resolve(**INSTANCE).offload_optimizer
    assert resolve(delay_grad_averaging=True).delay_optimizer_step
    for local in (resolve(use_local_updates=True), resolve(grad_averager=None)):
        assert local.use_local_updates
        assert local.grad_averager_factory is None
        assert not local.offload_optimizer
        assert not local.use_ext_grad_buffer


def test_a_delayed_step_delays_the_average():
    assert resolve(delay_optimizer_step=True, delay_state_averaging=False).delay_state_averaging
    assert not resolve(delay_state_averaging=False).delay_state_averaging
    local = resolve(
        delay_optimizer_step=True, delay_state_averaging=False, offload_optimizer=True, use_local_updates=True
    )
    assert not local.delay_state_averaging, "there the step before is one of many, which is waited for"


@pytest.fixture
def make_optimizer(make_dhts, closing):
    def make(**options) -> Optimizer:
        (dht,) = make_dhts(1, clients=options.pop("clients", 0))
        model = options.pop("model", None) or make_model()
        defaults = {"run_id": "run", "target_batch_size": 32, "optimizer": sgd, "params": model.parameters()}
        return closing(Optimizer(dht=dht, **{**defaults, **options}))

    return make


def test_options_reach_the_averagers(make_optimizer):
    opt = make_optimizer(
        grad_compression=Float16Compression(),
        load_state_compression=Float16Compression(),
        matchmaking_time=7.0,
        averaging_timeout=11.0,
        averager_opts={"target_group_size": 16, "request_timeout": 2.5},
        tracker_opts={"metadata_expiration": 33.0},
    )
    for averager in (opt.grad_averager, opt.state_averager):
        assert averager.matchmaking_kwargs["min_matchmaking_time"] == 7.0
        assert averager.matchmaking_kwargs["target_group_size"] == 16
        assert averager.request_timeout == 2.5
    assert isinstance(opt.grad_averager.allreduce_kwargs["compression"], Float16Compression)
    assert isinstance(opt.state_averager.allreduce_kwargs["compression"], NoCompression)
    assert opt.tracker.metadata_expiration == 33.0
    assert (opt.grad_averager.prefix, opt.state_averager.prefix) == ("run_grad_averager", "run_state_averager")


def test_a_preset_of_the_factory_is_kept(make_optimizer):
    opt = make_optimizer(grad_averager=GradientAverager.get_factory(compression=Float16Compression()))
    assert isinstance(opt.grad_averager.allreduce_kwargs["compression"], Float16Compression)


@pytest.mark.parametrize("client_mode", [None, True, False])
def test_client_mode_defaults_to_that_of_the_dht(make_optimizer, client_mode):
    opt = make_optimizer(client_mode=client_mode)
    assert opt.client_mode is bool(client_mode)
    assert opt.grad_averager.client_mode is opt.state_averager.client_mode is opt.tracker.client_mode is opt.client_mode


def test_it_is_a_torch_optimizer(make_optimizer):
    model = make_model()
    opt = make_optimizer(optimizer=torch.optim.Adam(model.parameters(), lr=0.5), params=None, batch_size_per_step=4)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.defaults["lr"] == 0.5
    assert isinstance(opt.param_groups, tuple)
    assert [p is q for p, q in zip(opt.param_groups[0]["params"], model.parameters(), strict=True)] == [True, True]
    assert opt.param_groups[0] is opt.opt.param_groups[0], "a schedule of the user's own reaches the inner optimizer"
    assert opt.state is opt.opt.state
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    assert opt.step(lambda: calls.append("closure")) is None
    assert calls == ["before", "closure", "after"]
    with pytest.raises(ValueError, match="cannot be added"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_an_offloaded_optimizer_shows_the_users_parameters(make_optimizer):
    model = make_model()
    opt = make_optimizer(params=[{"params": [model.weight], "lr": 0.3}, {"params": [model.bias]}], model=model)
    assert [group["params"][0] is p for group, p in zip(opt.param_groups, model.parameters(), strict=True)] == [
        True
    ] * 2
    assert [group["lr"] for group in opt.param_groups] == [0.3, 0.1]
    assert opt.opt.param_groups[0]["params"][0] is not model.weight


def test_checkpoints_restore_state_and_epoch(make_optimizer):
    model = make_model()
    opt = make_optimizer(optimizer=torch.optim.Adam(model.parameters()), params=None)
    opt.state_averager.local_epoch = 5
    opt.opt.state[model.weight]["exp_avg"].fill_(3.0)
    saved = opt.state_dict()
    assert saved["shoal"]["local_epoch"] == 5
    other_model = make_model()
    other = make_optimizer(run_id="other", optimizer=torch.optim.Adam(other_model.parameters()), params=None)
    other.load_state_dict(saved)
    assert other.local_epoch == 5
    assert other.opt.state[other_model.weight]["exp_avg"].mean() == 3.0
    assert saved["shoal"]["local_epoch"] == 5, "the argument is not changed"


def test_gradients_in_place_must_not_be_zeroed(make_optimizer):
    model = make_model()
    opt = make_optimizer(model=model)
    model(torch.zeros(1, 4)).sum().backward()
    opt.zero_grad(set_to_none=False)
    assert model.weight.grad.sum() == 0
    opt.zero_grad()
    assert model.weight.grad is None
    with pytest.raises(ValueError, match="reuse_grad_buffers"):
        make_optimizer(run_id="other", reuse_grad_buffers=True).zero_grad()


def test_arguments_of_a_step(make_optimizer):
    opt = make_optimizer()
    with pytest.raises(ValueError, match="batch_size"):
        opt.step()
    with pytest.raises(ValueError, match="negative"):
        opt.step(batch_size=-1)
    with pytest.raises(ValueError, match="GradScaler"):
        opt.step(batch_size=1, grad_scaler=object())
    auxiliary = make_optimizer(run_id="other", auxiliary=True)
    for arguments in ({"closure": lambda: None}, {"batch_size": 1}, {"grad_scaler": object()}):
        with pytest.raises(ValueError, match=r"auxiliary|GradScaler"):
            auxiliary.step(**arguments)


def test_bad_numbers(make_optimizer):
    with pytest.raises(ValueError, match="average_state_every"):
        make_optimizer(average_state_every=0)


@pytest.mark.parametrize(
    ("matchmaking_time", "averaging_timeout", "expected"),
    [(15.0, 60.0, 15.0), (1.0, 60.0, 15.0), (18.0, 60.0, 18.0), (10.0, 24.0, 8.0), (60.0, 60.0, 20.0)],
)
def test_a_silent_reducer_is_given_up_in_time(matchmaking_time, averaging_timeout, expected):
    silence = default_silence(matchmaking_time, averaging_timeout)
    assert silence == pytest.approx(expected)
    assert 2 * silence < averaging_timeout
