"""What cannot work is refused when it is made, with what to do about it, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shoal import DHT, DecentralizedAverager, DiLoCo, Float16Compression, Optimizer, TopKCompression, TrainingAverager
from shoal.access.tokens import Token, roles_named
from shoal.errors import NotAMemberError, ReactorError
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.progress_tracker import ProgressTracker
from shoal.optim.state_averager import TrainingStateAverager
from tests.optim.conftest import backward, make_model, sgd


class FreeOfSchedules(torch.optim.SGD):
    """Has modes, as the optimizers of the package ``schedulefree`` have: it begins in the wrong one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.eval()

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False

    def step(self, closure: Any = None) -> Any:
        assert all(group["train_mode"] for group in self.param_groups), "not in train mode"
        return super().step(closure)


@pytest.fixture(scope="module")
def dht() -> Iterator[DHT]:
    with DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        yield dht


def handlers_of(dht: DHT) -> set[str]:
    return set(dht.node.p2p.server.handlers)


def make(dht: Any, **options: Any) -> Optimizer:
    model = options.pop("trained", make_model)
    model = model if isinstance(model, nn.Module) else model()
    defaults = {"run_id": "run", "target_batch_size": 32, "optimizer": sgd, "params": model.parameters()}
    if isinstance(options.get("optimizer"), torch.optim.Optimizer):
        del defaults["params"]
    return Optimizer(dht=dht, **{**defaults, **options})


def instance_of(kind: type, *arguments: Any, **options: Any) -> Any:
    return kind(make_model().parameters(), *arguments, **options)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, ValueError, "LBFGS evaluates the loss several times.*Adam or SGD"),
    "LBFGS that is made": ({"optimizer": instance_of(torch.optim.LBFGS)}, ValueError, "LBFGS evaluates the loss"),
    "SparseAdam": ({"optimizer": torch.optim.SparseAdam}, ValueError, "SparseAdam needs sparse gradients.*use Adam"),
    "SparseAdam that is made": ({"optimizer": instance_of(torch.optim.SparseAdam)}, ValueError, "use Adam"),
    "sparse embeddings": ({"trained": lambda: nn.Embedding(9, 4, sparse=True)}, ValueError, "Embedding.*sparse=False"),
    "sparse parameters": ({"params": [torch.eye(3).to_sparse()]}, ValueError, "layout torch.sparse_coo.*to_dense"),
    "lazy modules": ({"trained": nn.LazyLinear(3)}, ValueError, "lazy module.*run a batch through the model first"),
    "eval mode": ({"optimizer": FreeOfSchedules}, ValueError, r"FreeOfSchedules is in eval mode.*call its train\(\)"),
    "eval mode, made": ({"optimizer": instance_of(FreeOfSchedules)}, ValueError, "in eval mode"),
    "no tensor": ({"params": [3.0]}, TypeError, "parameter 0 must be a tensor, got a float"),
    "no optimizer": ({"optimizer": lambda _: "sgd"}, TypeError, "must return a torch optimizer, got a str"),
    "codec as text": ({"grad_compression": "fp16"}, TypeError, "grad_compression must be a codec.*got 'fp16'"),
    "codec as class": (
        {"state_averaging_compression": Float16Compression},
        TypeError,
        r"state_averaging_compression must be a codec, got the class.*write Float16Compression\(\)",
    ),
    "codec for downloads": (
        {"load_state_compression": Float16Compression},
        TypeError,
        "load_state_compression must be",
    ),
    "sparse downloads": (
        {"load_state_compression": TopKCompression()},
        ValueError,
        "load_state_compression must send every value, TOPK_2BIT, density 0.015625 does not: use Float16Compression",
    ),
    "codec inside": ({"averager_opts": {"compression": "fp16"}}, TypeError, "compression must be a codec"),
    "batches of nothing": ({"batch_size_per_step": 0}, ValueError, "batch_size_per_step must be positive, got 0"),
    "half a sample": ({"batch_size_per_step": 2.5}, TypeError, "batch_size_per_step must be a whole number.*got 2.5"),
    "target as float": ({"target_batch_size": 4096.0}, TypeError, "target_batch_size must be a whole number.*4096.0"),
    "target of nothing": ({"target_batch_size": 0}, ValueError, "target_batch_size must be positive, got 0"),
    "no name": ({"run_id": ""}, ValueError, "run_id is empty: choose a name"),
    "no text": ({"run_id": None}, TypeError, "run_id must be a text.*got None"),
    "dots": ({"run_id": "run.1"}, AssertionError, "run_id must not contain dots.*use '_'"),
    "no model": ({"model": "resnet"}, TypeError, "model must be a torch.nn.Module, got a str"),
    "scheduler fails": ({"scheduler": lambda _: 1 / 0}, ZeroDivisionError, ""),
    "averager fails": ({"grad_averager": lambda **_: 1 / 0}, ZeroDivisionError, ""),
    "unknown option": ({"tracker_opts": {"refresh": 1}}, TypeError, "refresh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_fix(dht: DHT, name: str) -> None:
    options, error, text = REFUSED[name]
    before = handlers_of(dht)
    with pytest.raises(error, match=f"(?s){text}"):
        make(dht, **options)
    assert handlers_of(dht) == before, "it has left something behind"


def test_sparse_embeddings_that_somebody_else_trains(dht: DHT) -> None:
    model = nn.ModuleList([nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, sparse=True)])
    make(dht, trained=model[0], model=model).shutdown()
    make(dht, trained=model[0]).shutdown()


def test_a_model_that_cannot_be_found(
    dht: DHT, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    gc.freeze()
    monkeypatch.setattr("gc.get_freeze_count", lambda: 1)  # tests/conftest.py hides it
    make(dht, trained=model).shutdown()
    (warning,) = (record.getMessage() for record in caplog.records if "no module" in record.getMessage())
    assert "model=" in warning
    caplog.clear()
    make(dht, trained=model, model=model).shutdown()
    make(dht, trained=make_model()).shutdown()
    assert caplog.records == []


def test_a_late_failure_leaves_nothing_behind(dht: DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    before, weights = handlers_of(dht), nn.Parameter(torch.ones(1))
    with pytest.raises(TypeError, match="refresh"):
        make(dht, params=[weights], reuse_grad_buffers=True, tracker_opts={"refresh": 1})
    assert not weights._backward_hooks
    monkeypatch.setattr(ProgressTracker, "run_in_background", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(dht, params=[weights], reuse_grad_buffers=True)
    assert handlers_of(dht) == before
    assert not weights._backward_hooks
    monkeypatch.undo()
    with make(dht) as optimizer:
        assert optimizer.is_alive(), "the name of the run is still free"


@pytest.mark.parametrize("given", [None, "/ip4/127.0.0.1/tcp/1", []], ids=str)
def test_no_dht(given: Any) -> None:
    for kind, arguments in (
        (make, {}),
        (lambda dht: DecentralizedAverager([torch.zeros(1)], dht, start=True, prefix="run"), {}),
        (lambda dht: ProgressTracker(dht, "run", 8, start=True), {}),
    ):
        with pytest.raises(TypeError, match=r"dht must be a DHT, got .*make one with shoal\.DHT\("):
            kind(given, **arguments)


def test_a_dht_that_is_not_at_work() -> None:
    later = DHT(start=False)
    with pytest.raises(RuntimeError, match=r"not started: call run_in_background\(\)"):
        make(later)
    with DHT(start=True) as over:
        pass
    with pytest.raises(ReactorError, match="shut down: create a new one"):
        make(over)


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.leaves_something  # gloo's own sockets
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning:torch.distributed")  # of torch before 2.7
def test_parameters_that_are_spread_over_processes(dht: DHT, process_group: None) -> None:
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    part = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))))
    with pytest.raises(ValueError, match=r"parameter 0 is a DTensor.*the whole model.*MultiProcessOptimizer"):
        make(dht, params=[part])


@pytest.mark.parametrize("reuse_grad_buffers", [False, True])
def test_sparse_gradients_that_nobody_could_foresee(dht: DHT, reuse_grad_buffers: bool) -> None:
    weights = nn.Parameter(torch.ones(4, 3))
    with make(dht, params=[weights], reuse_grad_buffers=reuse_grad_buffers) as optimizer:
        nn.functional.embedding(torch.tensor([1]), weights, sparse=True).sum().backward()
        with pytest.raises(ValueError, match=r"shape \(4, 3\) is sparse.*sparse=False"):
            optimizer.step(batch_size=1)


def test_codecs_of_an_averager(dht: DHT) -> None:
    for option in ("compression", "state_compression"):
        with pytest.raises(TypeError, match=f"^{option} must be a codec"):
            DecentralizedAverager([torch.zeros(1)], dht, start=True, prefix="run", **{option: Float16Compression})
    with pytest.raises(ValueError, match="prefix must be the name of a run, got ''"):
        DecentralizedAverager([torch.zeros(1)], dht, start=True, prefix="")


def test_counts_may_be_of_any_whole_kind(dht: DHT) -> None:
    numpy = pytest.importorskip("numpy")
    with make(dht, target_batch_size=numpy.int64(32), batch_size_per_step=torch.tensor(8)) as optimizer:
        assert optimizer.target_batch_size == 32
        with pytest.raises(TypeError, match="batch_size must be a whole number"):
            optimizer.step(batch_size=0.5)


# --- twice the same ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_mode", [False, True])
def test_one_run_has_one_optimizer_on_a_dht(dht: DHT, client_mode: bool) -> None:
    first = make(dht, client_mode=client_mode)
    with pytest.raises(ValueError, match=r"an Optimizer with run_id 'run' is at work.*call its shutdown\(\).*`with`"):
        make(dht, client_mode=client_mode)
    assert first.is_alive()
    first.shutdown()
    with make(dht, client_mode=client_mode) as second, make(dht, run_id="other"):
        assert second.is_alive()


def test_garbage_makes_place_for_the_next(dht: DHT) -> None:
    for _ in range(3):
        make(dht).itself = "a cycle"  # type: ignore[attr-defined]
        optimizer = make(dht, run_id="other")
        optimizer.itself = optimizer  # type: ignore[attr-defined]
        del optimizer
    make(dht, run_id="other").shutdown()
    for _ in range(3):
        averager = DecentralizedAverager([torch.zeros(1)], dht, start=True, prefix="averager")
        averager.shutdown_timeout = 0  # it is not waited for
        del averager
        tracker = ProgressTracker(dht, "tracker", 8, start=True)
        del tracker
    gc.collect()


def test_averagers_and_trackers_with_one_name(dht: DHT) -> None:
    def averager(kind: type = DecentralizedAverager, **options: Any) -> Any:
        return kind([torch.nn.Parameter(torch.zeros(1))], dht=dht, prefix="run", **options)

    with averager(start=True):
        with pytest.raises(ValueError, match=r"an averager with prefix 'run' is at work on this DHT already"):
            averager(start=True)
        later = averager(GradientAverager, start=False)
        with pytest.raises(ValueError, match="an averager with prefix 'run'"):
            later.run_in_background()
    with (
        ProgressTracker(dht, "run", 8, start=True),
        pytest.raises(ValueError, match="a progress tracker with prefix 'run' is at work"),
    ):
        ProgressTracker(dht, "run", 8, start=True)


# --- after the end ----------------------------------------------------------------------------------------------------


def test_no_step_after_the_end(dht: DHT) -> None:
    model = make_model()
    optimizer = make(dht, trained=model)
    backward(model, torch.ones(4, 6))
    optimizer.step(batch_size=4)
    optimizer.shutdown()
    with pytest.raises(ReactorError, match="this Optimizer is shut down"):
        optimizer.step(batch_size=4)
    averager = DecentralizedAverager([torch.zeros(1)], dht, start=True, prefix="run")
    averager.shutdown()
    with pytest.raises(ReactorError, match="this DecentralizedAverager is shut down"):
        averager.step()


def test_no_step_after_the_end_of_the_dht() -> None:
    own = DHT(start=True)
    with make(own) as optimizer, DecentralizedAverager([torch.zeros(1)], own, start=True, prefix="alone") as averager:
        own.shutdown()
        with pytest.raises(ReactorError, match="this DHT is shut down"):
            optimizer.step(batch_size=4)
        with pytest.raises(ReactorError, match="the DHT of this DecentralizedAverager is shut down"):
            averager.step(timeout=1)


# --- copies -----------------------------------------------------------------------------------------------------------


def save(thing: Any) -> None:
    torch.save(thing, io.BytesIO())


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy, save], ids=lambda way: way.__name__)
def test_what_is_at_work_cannot_be_copied(dht: DHT, way: Any) -> None:
    parameters = list(make_model().parameters())
    options: dict[str, Any] = {"start": False, "prefix": "run", "dht": dht}
    things: dict[Any, str] = {
        dht: "make another DHT with them as initial_peers",
        make(dht): r"save its state_dict\(\)",
        DecentralizedAverager(parameters, **options): "save the tensors",
        GradientAverager(parameters, **options): "save the tensors",
        TrainingStateAverager(optimizer=sgd(parameters), **options): r"make_checkpoint\(\)",
        TrainingAverager(sgd(parameters), average_parameters=True, average_gradients=False, **options): "save",
        ProgressTracker(dht, "tracker", 8, start=False): "make another one",
    }
    for thing, advice in things.items():
        with pytest.raises(TypeError, match=f"{type(thing).__name__} cannot be pickled, copied or saved.*{advice}"):
            way(thing)
    for thing in things:
        if thing is not dht:
            thing.shutdown()


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
@pytest.mark.parametrize("role", ["monitor", "relay"])
def test_a_token_without_the_role_is_refused(kind, role):
    """Otherwise the peer would train alone, because nobody lets it in."""
    guest = Token.new_run("secret").invite(roles_named(role), 32_000_000_000)
    own = {"target_batch_size": 32} if kind is Optimizer else {"sync_every": 4}
    with DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], token=guest.text) as dht:
        for auxiliary in (False, True):
            options = {"run_id": "run", "optimizer": sgd, "params": make_model().parameters(), "auxiliary": auxiliary}
            with pytest.raises(NotAMemberError, match=f"the token of this peer allows: {role}.*--role train"):
                kind(dht=dht, **own, **options)
        assert not any("run_" in name for name in handlers_of(dht))


def test_on_mismatch_takes_one_of_two_words(dht):
    with pytest.raises(ValueError, match="on_mismatch must be 'raise' or 'warn', got 'ignore'"):
        make(dht, on_mismatch="ignore")


def test_a_private_run_is_in_no_list(dht):
    """Its name is nobody else's business, not even that of others with the same token."""
    secret = Token.new_run("secret")
    with (
        DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], token=secret.text) as private,
        make(private) as optimizer,
        make(dht) as open_one,
    ):
        assert optimizer.tracker.exchange.runs is None
        assert open_one.tracker.exchange.runs is not None
