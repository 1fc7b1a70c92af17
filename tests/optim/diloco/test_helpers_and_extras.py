"""Peers of DiLoCo that only help, and tensors that are averaged although nobody trains them."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from shoal.compression import Blockwise4BitQuantization, Float16Compression, TopKCompression
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import ExtraTensors
from tests.optim.conftest import backward, in_parallel, make_model, values, wait_until
from tests.optim.diloco.test_diloco import Trainer, check_same, introduce, train_until_all_agree

DEFAULTS = {"sync_every": 4, "run_id": "run", "matchmaking_time": 5.0, "averaging_timeout": 20.0}


@pytest.fixture
def make(closing):
    def make(dht, seed=0, extra=None, **options):
        model = make_model(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = {} if extra is None else {"extra_tensors": extra}
        batches = {} if options.get("auxiliary") else {"batch_size_per_step": 8}
        return Trainer(
            closing(DiLoCo(dht=dht, optimizer=inner, **{**DEFAULTS, **batches, **given, **options})), model, seed
        )

    return make


@pytest.mark.parametrize(
    "codec",
    [Float16Compression(), Blockwise4BitQuantization(), TopKCompression(density=1 / 8)],
    ids=["float16", "4 bits", "sparse"],
)
def test_an_auxiliary_peer_and_a_client(make_dhts, make, codec):
    """The others have the same bits, whether the auxiliary passes messages on or averages."""
    (helping,), dhts = make_dhts(1), make_dhts(2, clients=1)
    trainers = [make(dht, compression=codec, fragments=2) for dht in dhts]
    helper = make(helping, 5, compression=codec, fragments=2, auxiliary=True)
    before, stop, helped = values(helper.model), threading.Event(), []

    def help_others():
        while not stop.wait(0.005):
            helper.opt.step()
            if (latest := helper.opt.averager.last_round) is not None and latest not in helped:
                helped.append(latest)

    thread = threading.Thread(target=help_others)
    thread.start()
    try:
        introduce(*(trainer.opt for trainer in trainers))
        train_until_all_agree(*trainers)
        while not helped:  # on a busy machine it may come too late for the first rounds
            train_until_all_agree(*trainers)
        wait_until(lambda: helper.opt.local_epoch > 0, "the auxiliary follows the swarm")
    finally:
        stop.set()
        thread.join()
    check_same(*trainers)
    assert helped, "it was in rounds"
    for each in helped:
        assert helping.peer_id in each.auxiliaries
    for trainer in trainers:
        assert helping.peer_id not in trainer.opt.last_round.peers
        assert len(trainer.opt.last_round.weights) == 2
    assert torch.equal(values(helper.model), before), "its own parameters are left alone"
    assert helper.opt.inner_steps == 0
    with pytest.raises(ValueError, match="no batches"):
        helper.opt.step(batch_size=8)


def with_extras(number):
    return [torch.full((3,), float(number)), torch.tensor(10 * number)]


def test_extra_tensors_are_averaged_as_they_are(make_dhts, make):
    """Without loss, however coarse the codec is; a newcomer begins with those of a peer."""
    dhts = make_dhts(3)
    extras = [with_extras(number) for number in (1, 2, 7)]
    options = {"compression": TopKCompression(density=1 / 8), "fragments": 2}
    trainers = [make(dht, extra=extra, **options) for dht, extra in zip(dhts[:2], extras, strict=False)]
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 1) for trainer in trainers))
    in_parallel(*(lambda t=trainer: t.outer for trainer in trainers))
    for floats, count in extras[:2]:
        assert floats.tolist() == [1.5] * 3
        assert count.item() == 15
    late = make(dhts[2], extra=extras[2], **options)
    late.train_until(1)
    assert late.opt.last_round is None, "it has only downloaded"
    assert extras[2][0].tolist() == [1.5] * 3
    assert extras[2][1].item() == 15


def test_a_round_that_fails_leaves_extra_tensors_alone(make_dhts, make):
    (dht,) = make_dhts(1)
    extra = with_extras(3)
    lone = make(dht, extra=extra)
    lone.train_until(3)
    assert extra[0].tolist() == [3.0] * 3
    assert extra[1].item() == 30


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([1.0], TypeError, "number 0 is a float"),
        ([torch.zeros(2, dtype=torch.complex64)], ValueError, "only real numbers"),
        ([torch.zeros(2, requires_grad=True) * 2], ValueError, r"give \.detach\(\) of it"),
    ],
)
def test_extra_tensors_that_cannot_be(tensors, error, message):
    with pytest.raises(error, match=message):
        ExtraTensors(tensors)


def test_parameters_are_no_extra_tensors():
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="leave it out"):
        ExtraTensors([torch.zeros(1), parameter], [parameter])


@pytest.mark.parametrize("given", [[], [torch.zeros(2)], [torch.full((3,), float("nan"))]])
def test_what_another_peer_has_must_fit(given):
    own = torch.ones(3)
    with pytest.raises(ValueError, match="not 3 finite numbers"):
        ExtraTensors([own]).load(given)
    assert own.tolist() == [1.0] * 3


def test_batch_norms_of_peers_come_together(make_dhts, closing):
    """What extra tensors are for: models that normalize by running means give the same answers."""
    models, opts = [], []
    for dht in make_dhts(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        opt = DiLoCo(dht=dht, optimizer=inner, batch_size_per_step=8, extra_tensors=list(model.buffers()), **DEFAULTS)
        models.append(model)
        opts.append(closing(opt))
    introduce(*opts)

    def train(number):
        rng = torch.Generator().manual_seed(number)
        while opts[number].local_epoch < 1:
            opts[number].zero_grad()
            backward(models[number], torch.randn(8, 6, generator=rng) + number)
            opts[number].step()

    in_parallel(lambda: train(0), lambda: train(1))
    batch = torch.randn(4, 6)
    first, second = (model.eval()(batch) for model in models)
    assert len(opts[0].last_round.peers) == 2
    assert torch.equal(first, second)
