"""A model in stages as users train it: real modules, real peers, and the result of a single process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.access.badges import ROLES_BY_NAME
from shoal.access.tokens import Token
from shoal.base.reactor import in_thread
from shoal.errors import MicrobatchError, NotAMemberError, ReactorError
from shoal.optim import options
from shoal.stages import model
from shoal.stages.compute import StageCompute, seeded
from shoal.stages.hop import Request, StageReply
from tests.device import chosen_device
from tests.optim.conftest import in_parallel, over_sockets, wait_until
from tests.stages.test_compute import ADAMW, MAX_NORM, SAMPLES, SGD, WORDS, Block, Embedding, Head, difference

pytestmark = pytest.mark.oldest
STEPS, MICROBATCHES, SEED = 5, 4, 1000


def stage_factories() -> tuple[list[nn.Module], list[Callable[[], nn.Module]]]:
    torch.manual_seed(0)
    modules = [module.to(chosen_device()) for module in (Embedding(), Block(), Block(), Head())]
    return modules, [functools.partial(lambda each: each, module) for module in modules]


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (count, SAMPLES), generator=generator)
    return [(each, (each + 1) % WORDS) for each in words]


def train_alone(make: Any, clips: bool) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """Train with the same random numbers, in the plainest way."""
    modules, found = stage_factories()[0], []
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = make(parameters)
    for number, (words, labels) in enumerate(data(STEPS * MICROBATCHES)):
        x: Any = (words.to(chosen_device()),)
        for stage, module in enumerate(modules):
            with seeded(SEED + number + 1, stage, torch.device(chosen_device())):
                x = module(*x) if stage < 3 else module(*x, labels.to(chosen_device()))
        found.append(x.detach().cpu())
        (x.mean() / MICROBATCHES).backward()
        if number % MICROBATCHES == MICROBATCHES - 1:
            if clips:
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return modules, found


@pytest.fixture
def make_peer(closing: Any) -> Callable[..., shoal.StagedModel]:
    def make(dht: Any, stage: Any, factories: Any, **options: Any) -> shoal.StagedModel:
        defaults = {"optimizer": SGD, "target_batch_size": MICROBATCHES * SAMPLES, "seed": SEED}
        return closing(
            shoal.StagedModel(
                dht=dht,
                run_id="run",
                stages=factories,
                stage=stage,
                **{**defaults, **options},  # type: ignore[arg-type]
            )
        )

    return make


@pytest.mark.parametrize(("make", "clips"), [(SGD, True), (ADAMW, False)], ids=["SGD-clipped", "AdamW"])
def test_result_is_that_of_one_process(make_dhts, make_peer, make, clips):
    expected, losses = train_alone(make, clips)
    modules, factories = stage_factories()
    dhts = make_dhts(5)
    options = {"optimizer": make, "clip_grad_norm": MAX_NORM if clips else None}
    peers = [make_peer(dht, stage, factories, **options) for dht, stage in zip(dhts, [0, 1, 2, 3, None], strict=True)]
    found = list(peers[-1].train(data(STEPS * MICROBATCHES)))
    torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-5, atol=1e-6)
    wait_for_epoch(peers, STEPS)
    # Running means depend on the order in which microbatches pass, which is not fixed.
    assert difference(modules, expected, buffers=False) <= 1e-6


def wait_for_epoch(peers: list[shoal.StagedModel], epoch: int) -> None:
    wait_until(lambda: min(peer.local_epoch for peer in peers) >= epoch, f"all peers are at step {epoch}")


class Last(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x * scale), labels, reduction="none")


WIDTH = 1024
SHARED = nn.Linear(2, 2)
# Between these stages there is far more to send than the words and the labels.
WIDE = [
    functools.partial(nn.Embedding, WORDS, WIDTH),
    functools.partial(nn.LayerNorm, WIDTH),
    functools.partial(Last, WIDTH),
]


@over_sockets
def test_driver_sends_no_activations(make_dhts, make_peer):
    dhts = make_dhts(4)
    codecs = {"optimizer": ADAMW, "compression": [shoal.Float16Compression(), shoal.BlockwiseQuantization()]}
    peers = [make_peer(dht, stage, WIDE, **codecs) for stage, dht in enumerate(dhts[:3])]
    driver = make_peer(dhts[3], None, WIDE, **codecs)
    assert [peer.held for peer in (*peers, driver)] == [[0], [1], [2], []]
    microbatches = data(24)
    losses = list(driver.train(microbatches))
    assert losses[0].mean() > losses[-1].mean() >= 0
    content = sum(words.nbytes + labels.nbytes + 4 * SAMPLES for words, labels in microbatches)
    metrics = [each.p2p.metrics for each in dhts]
    handlers = [f"run::StageService.rpc_{each}" for each in ("carry", "channel")]
    sent = [sum(each.bytes_sent_by_handler[handler] for handler in handlers) for each in metrics]
    assert sent[3] <= content + 24 * 2048
    activation = WIDTH * SAMPLES
    for sender, width in ((0, 2), (1, 1 + 2)):
        assert 0 < sent[sender] - 24 * width * activation < 24 * 4096
    assert metrics[3].microbatches_done == 24
    assert not metrics[3].microbatches_resent


def test_one_peer_may_hold_all_stages_and_drive(make_dhts, make_peer):
    modules, factories = stage_factories()
    (dht,) = make_dhts(1)
    model = make_peer(dht, range(4), factories)
    for _ in model.train(data(MICROBATCHES)):
        pass
    wait_for_epoch([model], 1)
    before = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    found = list(model.evaluate(data(3)))
    for module, values in zip(modules, before, strict=True):
        assert module.training
        assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
        module.eval()
    for losses, (words, labels) in zip(found, data(3), strict=True):
        x: Any = (words,)
        for module in modules[:3]:
            x = module(*x)
        torch.testing.assert_close(losses, modules[3](*x, labels).detach(), rtol=1e-5, atol=1e-6)


def test_gradients_reach_what_comes_before_the_stages(make_dhts, make_peer):
    (dht,) = make_dhts(1)
    last = Last(4)
    model = make_peer(dht, [0, 1], [nn.Tanh, lambda: last])
    first, inputs, labels, scale = nn.Linear(5, 4), torch.randn(6, 5), torch.arange(6) % 3, torch.tensor(2.0)
    losses = model(first(inputs), labels, {1: {"scale": scale}})
    losses.mean().backward()
    found = [parameter.grad.clone() for parameter in first.parameters()]
    first.zero_grad()
    expected = last(torch.tanh(first(inputs)), labels, scale)
    expected.mean().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(found, [parameter.grad for parameter in first.parameters()])
    with pytest.raises(ValueError, match=r"call losses\.mean\(\)\.backward\(\)"):
        (model(first(inputs), labels, {1: {"scale": scale}}) * torch.arange(6)).sum().backward()
    with torch.no_grad():
        assert not model(first(inputs), labels, {1: {"scale": scale}}).requires_grad


def test_shutdown_ends_what_others_wait_for(make_dhts, make_peer):
    (dht,) = make_dhts(1)
    model = make_peer(dht, None, WIDE)
    words, labels = data(1)[0]
    uses = (lambda: model(words, labels), lambda: list(model.train(data(9))), lambda: list(model.evaluate(data(9))))
    waiting = [in_thread(use) for use in uses]
    wait_until(lambda: model._driver is not None and len(model._portal._pending) >= 3, "all wait for a peer")
    model.shutdown()
    for each in waiting:
        with pytest.raises(ReactorError, match=r"(was|is) shut down"):
            each.result(10)


def test_nothing_is_started_after_shutdown(make_dhts, make_peer):
    (dht,) = make_dhts(1)
    model = make_peer(dht, 0, WIDE)
    model.shutdown()
    with pytest.raises(ReactorError, match="is shut down"):
        model.train([])
    assert model._tracker is None


def test_shutdown_waits_for_no_step(make_dhts, make_peer):
    dhts = make_dhts(3)
    options = {"optimizer_opts": {"matchmaking_time": 2.0, "averaging_timeout": 50.0}, "target_batch_size": 10**6}
    first, second, driver = (
        make_peer(dht, stage, WIDE[-1:], **options) for dht, stage in zip(dhts, [0, 0, None], strict=True)
    )
    list(driver.train([(torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long)) for _ in range(16)]))
    frozen = second._network.service.hosts[0]
    frozen._judge_claims = lambda: False  # it takes part in no step
    host = first._network.service.hosts[0]
    first._portal.reactor.loop.call_soon_threadsafe(host.close_step, 0, dhts[2].peer_id)
    wait_until(lambda: host._stepping is not None, "it makes a step")
    closing = in_thread(first.shutdown)
    closing.result(15)


def test_newcomers_take_the_stages_that_nobody_holds(make_dhts, make_peer):
    dhts = make_dhts(3)
    peers = in_parallel(*(functools.partial(make_peer, dht, "auto", WIDE) for dht in dhts))
    assert sorted(peer.held for peer in peers) == [[0], [1], [2]]
    assert len(list(peers[0].train(data(4)))) == 4


def test_peers_come_and_go_while_others_train(make_dhts, make_peer):
    dhts = make_dhts(7)
    stages, options = [0, 1, 2, 1, None, None], {"optimizer": ADAMW, "optimizer_opts": {"matchmaking_time": 2.0}}
    peers = [make_peer(dht, stage, WIDE, **options) for dht, stage in zip(dhts[:6], stages, strict=True)]
    found: list[torch.Tensor] = []
    trainings = [each.train(data(60)) for each in peers[4:]]
    for number, (first, second) in enumerate(zip(*trainings, strict=True)):
        found += [first, second]
        if number == 10:
            peers[1].shutdown()
        if number == 20:
            peers.append(make_peer(dhts[6], 1, WIDE, **options))
        if number == 40:
            dhts[3].shutdown()  # all its connections end, whatever is under way
    assert len(found) == 120
    assert torch.stack(found[-20:]).mean() < 0.7 * torch.stack(found[:20]).mean()
    assert all(dht.p2p.metrics.microbatches_done == 60 for dht in dhts[4:6])


def test_a_private_run_admits_only_peers_that_may_train(network, closing, make_peer, monkeypatch):
    run, until = Token.new_run("friends"), int(time.time()) + 3600

    def join(role: str, *known: Any) -> shoal.DHT:
        token = run.invite(ROLES_BY_NAME[role], until).text
        return closing(shoal.DHT(known, start=True, token=token, transport=network.transport()))

    dhts = [join("train")]
    known = dhts[0].get_visible_maddrs()
    dhts += [join("train", *known) for _ in range(2)]
    peers = [make_peer(dht, stage, WIDE, optimizer=ADAMW) for stage, dht in enumerate(dhts)]
    assert len(list(peers[0].train(data(8)))) == 8
    watcher, liar = join("monitor", *known), join("relay", *known)
    for dht, stage in ((watcher, 1), (watcher, "auto"), (watcher, None), (liar, 1)):
        with pytest.raises(
            NotAMemberError, match=r"allows: (monitor|relay)\. It must not train: ask .* the role train"
        ):
            make_peer(dht, stage, WIDE)

    monkeypatch.setattr(options, "check_may_train", lambda dht: None)
    monkeypatch.setattr(model, "check_may_train", lambda dht: None)
    monkeypatch.setattr(liar.p2p.membership, "check_own", lambda roles: None)
    computed: list[torch.Tensor] = []
    module = nn.LayerNorm(WIDTH)
    module.register_forward_hook(lambda module, args, output: computed.append(output))
    held = make_peer(liar, 1, [WIDE[0], lambda: module, WIDE[2]], optimizer=ADAMW, backup=0)
    wait_until(lambda: liar.peer_id in peers[0]._network.directory.peers_of(1), "the others know what the liar says")
    assert len(list(peers[0].train(data(24)))) == 24
    assert not computed
    assert dhts[0].p2p.metrics.members_refused["wrong role"] > 0
    callers = ((dhts[0], liar, peers[0]), (liar, dhts[0], held))
    for caller, callee, made in callers:
        opening = made._network.service.open_call(callee.peer_id, anew=False)
        with pytest.raises(NotAMemberError, match=r"allows: relay\. This call needs: train"):
            caller.run_coroutine(functools.partial(ask, opening))


async def ask(opening: Any, dht: shoal.DHT, node: Any) -> None:
    """Send a microbatch's request, and wait for the answer."""
    async with opening as call:
        await call.send(Request(driver=dht.peer_id.to_bytes(), sequence=1, step=0, seed=0, samples=1, trains=True))
        await call.receive(StageReply)


def passes_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each microbatch that counts: the stage, and how many steps it is late."""
    found, count = list[tuple[int, int]](), StageCompute._count

    def note(self: StageCompute, task: Any) -> None:
        count(self, task)
        found.append((self.number, self.epoch - task.step))

    monkeypatch.setattr(StageCompute, "_count", note)
    return found


@over_sockets
def test_asynchronous_training_of_two_drivers(make_dhts, make_peer, monkeypatch):
    """Nothing hangs or is lost, no microbatch counts that is too old, and the loss falls."""
    found, dhts = passes_of(monkeypatch), make_dhts(4)
    options = {
        "optimizer": ADAMW,
        "synchronous": False,
        "target_batch_size": 2 * MICROBATCHES * SAMPLES,
        "in_flight": 2,  # fewer than a step has
        "optimizer_opts": {"matchmaking_time": 2.0},
    }
    two = [WIDE[0], WIDE[2]]
    peers = [make_peer(dht, number % 2, two, **options) for number, dht in enumerate(dhts)]
    losses: list[torch.Tensor] = []
    for both in zip(*(peer.train(data(40)) for peer in peers[:2]), strict=True):
        losses += both
    assert len(losses) == 80
    assert torch.stack(losses[-20:]).mean() < 0.7 * torch.stack(losses[:20]).mean()
    assert max(late for _, late in found) <= 1
    assert min(peer.local_epoch for peer in peers) >= 3


@over_sockets
def test_two_peers_of_each_stage_that_exchange_only_now_and_then(make_dhts, make_peer, caplog):
    dhts, two = make_dhts(5), [WIDE[0], WIDE[2]]
    options = {
        "optimizer": ADAMW,
        "inner_batch_size": SAMPLES,
        "target_batch_size": 3 * MICROBATCHES * SAMPLES,
        "optimizer_opts": {"matchmaking_time": 30.0},
    }
    # All of them come at once, with parameters of their own.
    make = [functools.partial(make_peer, dht, number % 2, two, **options) for number, dht in enumerate(dhts[:4])]
    peers, driver = in_parallel(*make), make_peer(dhts[4], None, two, **options)
    for stage in range(2):
        assert_equal(peers[stage::2], stage)
    losses = list(driver.train(data(12 * MICROBATCHES)))
    assert len(losses) == 12 * MICROBATCHES
    assert torch.stack(losses[-10:]).mean() < 0.7 * torch.stack(losses[:10]).mean()
    wait_for_epoch(peers, 4)
    for stage in range(2):
        assert_equal(peers[stage::2], stage)
    assert "cannot compute a microbatch" not in caplog.text
    assert "are lost" not in caplog.text


def assert_equal(peers: list[shoal.StagedModel], stage: int) -> None:
    """All have the same parameters of a stage."""
    first, *others = [list(peer.modules[stage].parameters()) for peer in peers]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stages": []}, "stages must be a list of functions"),
        ({"stages": [nn.Linear(2, 2)]}, "stages must be a list of functions"),
        ({"stages": [lambda: 5]}, "stage 0 must make a torch.nn.Module, got int"),
        ({"stage": 3}, "stage must be 'auto', a number from 0 to 2, a list of them, or None; got 3"),
        ({"stage": "first"}, "stage must be 'auto', a number"),
        ({"stage": [1, 1]}, "names a stage twice"),
        ({"stage": [0, 1], "stages": [lambda: SHARED] * 2}, "stages 0 and 1 share a parameter"),
        ({"target_batch_size": 0}, "target_batch_size must be"),
        ({"compression": [shoal.Float16Compression()]}, "one for each of the 2 boundaries, got 1"),
        ({"request_timeout": 500.0}, "request_timeout must be shorter than microbatch_timeout"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"rebalance_every": 0.0}, "rebalance_every must be seconds or None"),
        ({"backup": 2}, "backup 0 or 1: got 300.0, 2"),
        ({"backup_every": 0}, "at least 1: got 0"),
        ({"optimizer": "adam"}, r"such as partial\(torch.optim.AdamW, lr=3e-4\), got 'adam'"),
        ({"clip_grad_norm": 1.0, "inner_batch_size": 4}, "leave one out"),
        ({"optimizer_opts": {"auxiliary": True}}, "auxiliary cannot be given for a stage"),
        ({"optimiser": SGD}, "has no argument 'optimiser': did you mean optimizer"),
    ],
)
def test_impossible_options_are_refused(make_dhts, make_peer, options, why):
    (dht,) = make_dhts(1)
    options = {"stage": 0, "stages": WIDE, **options}
    with pytest.raises((ValueError, TypeError, AssertionError), match=why):
        make_peer(dht, options.pop("stage"), options.pop("stages"), **options)


@pytest.mark.parametrize("stage", [1, "auto"])
def test_a_peer_that_others_cannot_call_holds_no_stage(make_dhts, make_peer, stage):
    _, dht = make_dhts(2, clients=1)
    with pytest.raises(ValueError, match="leave out client_mode, or stage=None"):
        make_peer(dht, stage, WIDE)
    assert make_peer(dht, None, WIDE).held == []


def test_impossible_microbatches_are_refused(make_dhts, make_peer):
    (dht,) = make_dhts(1)
    model = make_peer(dht, None, WIDE)
    for microbatch, why in (
        (torch.ones(3), "must be .inputs, labels."),
        ((torch.tensor(3.0), None), r"first dimension, got the shape \(\)"),
        ((torch.ones(1), None, {3: {"mask": torch.ones(1)}}), "arguments for stage 3: there are stages 0 to 2"),
    ):
        with pytest.raises((TypeError, ValueError), match=why):
            list(model.train([microbatch]))
    with pytest.raises(ValueError, match="this peer holds no stage"):
        model.serve()


class Mean(Last):
    """Returns one loss for all samples, as if there were no other peers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return super().forward(x, labels, scale).mean()


def test_a_loop_ends_if_nothing_comes_through(make_dhts, make_peer, caplog):
    (dht,) = make_dhts(1)
    model = make_peer(dht, [0, 1], [WIDE[0], functools.partial(Mean, WIDTH)], target_batch_size=10**6)
    why = r"10 times in a row: the microbatch was dropped: .*one loss for each of the 6 samples.*all other dimensions"
    with pytest.raises(MicrobatchError, match=why):
        list(model.train(data(50)))
    with pytest.raises(MicrobatchError, match="nothing comes through, 3 times"):
        list(model.evaluate(data(3)))
    with pytest.raises(MicrobatchError, match="the microbatch was dropped"):
        model(*data(1)[0])
    assert "Traceback" in caplog.text
    assert list(model.train([])) == []


def test_single_microbatches_may_fail(make_dhts, make_peer):
    """Such as one in a hundred, whose losses are not finite."""
    (dht,) = make_dhts(1)
    model = make_peer(dht, [0, 1], [WIDE[0], functools.partial(Last, WIDTH)])
    bad = {1: {"scale": torch.tensor(float("nan"))}}
    batches = [(*each, bad if number % 3 else {}) for number, each in enumerate(data(24))]
    assert len(list(model.train(batches))) == 8


def test_the_last_step_is_made_when_a_loop_has_ended(make_dhts, make_peer):
    """The program may save the model then, or end its peer."""
    dhts = make_dhts(2)
    peers = [make_peer(dht, stage, [WIDE[0], functools.partial(Last, WIDTH)]) for stage, dht in enumerate(dhts)]
    for steps in (1, 2):
        assert len(list(peers[0].train(data(MICROBATCHES)))) == MICROBATCHES
        assert peers[0].local_epoch == steps
