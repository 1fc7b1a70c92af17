"""DiLoCo from end to end: known numbers between real peers, the same bits everywhere, joining, losing others."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from shoal.compression import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    Float16Compression,
    NoCompression,
    TopKCompression,
)
from shoal.compression.base import bytes_of
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.history.journal import hash_of
from tests.drills import mostly_drills
from tests.optim.conftest import backward, in_parallel, make_model, values, wait_until
from tests.optim.diloco.quadratic import A, B, near

PLAIN = functools.partial(torch.optim.SGD, lr=1.0)


class Peer:
    """A peer that pulls its two parameters towards a point."""

    def __init__(self, dht, target, **options):
        self.target, self.parameters = target, [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        inner = torch.optim.SGD(self.parameters, lr=0.5)
        defaults = {"compression": NoCompression(), "batch_size_per_step": 1, "run_id": "run", "matchmaking_time": 10.0}
        self.opt = DiLoCo(dht=dht, optimizer=inner, **{**defaults, "averaging_timeout": 20.0, **options})

    @property
    def model(self):
        return torch.cat(self.parameters).detach().clone()

    @property
    def outer(self):
        with self.opt.use_outer_parameters():
            return self.model

    def step(self):
        self.opt.zero_grad()
        (0.5 * (torch.cat(self.parameters) - self.target).square().sum()).backward()
        self.opt.step()


def introduce(*opts):
    """Wait until all know all others."""
    for opt in opts:
        opt.tracker.report_local_progress(0, 0)
        opt.tracker.board.report(0, 1, opt.tracker.board.own.time)
        opt.tracker.report_local_progress(0, 0)
    for opt in opts:
        wait_until(lambda t=opt.tracker: t.is_introduced, "its record is in the table")
    for opt in opts:
        opt.dht.portal.call(opt.tracker.exchange.fetch(8))
    for opt in opts:
        wait_until(
            lambda t=opt.tracker: len(t.expected_members(until_epoch=10)) == len(opts) - 1, "all know each other"
        )


@pytest.fixture
def make_pair(make_dhts, closing):
    def make(**options):
        peers = [Peer(dht, target, **options) for dht, target in zip(make_dhts(2), (A, B), strict=True)]
        for peer in peers:
            closing(peer.opt)
        introduce(*(peer.opt for peer in peers))
        return peers

    return make


def test_two_peers_make_the_known_updates(make_pair):
    peers = make_pair(sync_every=2)
    for expected in [(1.995, -0.9975), (2.8504875, -1.42524375), (2.76970247, -1.38485123)]:
        for _ in range(2):
            in_parallel(*(peer.step for peer in peers))
        for peer in peers:
            near(peer.model, expected)
            assert len(peer.opt.last_round.peers) == 2
            assert peer.opt.last_round.contributed
            assert peer.opt.last_round.weights == (1.0, 1.0)
        assert torch.equal(peers[0].model, peers[1].model)
    assert peers[0].opt.local_epoch == 3
    assert peers[0].opt.inner_steps == 6


def test_a_client_adopts_the_parameters_of_a_peer(make_dhts, closing):
    """Nobody can download those of the client, so the client adopts those of the other peer, whatever the tie says."""
    starts = [torch.tensor([0.5, 0.6]), torch.tensor([0.1, 0.2])]
    server, client = (
        Peer(dht, target, sync_every=2) for dht, target in zip(make_dhts(2, clients=1), (A, B), strict=True)
    )
    if hash_of(bytes_of(starts[0])) < hash_of(bytes_of(starts[1])):
        starts.reverse()  # among equals the client would win
    for peer, start in zip((server, client), starts, strict=True):
        closing(peer.opt)
        torch.nn.utils.vector_to_parameters(start, peer.parameters)
    introduce(server.opt, client.opt)
    outer = {server: {}, client: {}}  # by version: weights of the round, and what it came to

    def train(peer):
        while not any(len(weights) == 2 and all(weights) for found in outer.values() for weights, _ in found.values()):
            peer.step()
            if (made := peer.opt.last_round) is not None:
                outer[peer][made.version] = made.weights, peer.outer.clone()

    in_parallel(*(functools.partial(train, peer) for peer in (server, client)))
    both = outer[server].keys() & outer[client].keys()
    assert both, "they have made a round together"
    assert all(torch.equal(outer[server][version][1], outer[client][version][1]) for version in both)


@pytest.mark.slow_drill
@pytest.mark.leaves_something  # torch's compiler starts a thread that stays
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of the compiler itself
def test_a_compiled_function_may_call_step(make_dhts, closing):
    peer = Peer(make_dhts(1)[0], A, sync_every=2, outer_optimizer=PLAIN)
    closing(peer.opt)
    step = torch.compile(peer.step, backend="aot_eager")
    for _ in range(4):
        step()
    near(peer.model, (1 - 0.5**4, 0.0))
    assert peer.opt.local_epoch == 2


@pytest.mark.parametrize(
    ("alpha", "known"),
    [
        (
            0.5,
            [
                (3, 0, (1.435, 2.31)),
                (5, 1, (-0.6234375, -1.5921875)),
                (7, 0, (1.92907031, 2.89391406)),
                (9, 1, (-0.753491211, -1.72126465)),
                (11, 0, (1.80575569, 2.77340706)),
            ],
        ),
        (
            None,
            [
                (3, 0, (2.12, 2.37)),
                (5, 1, (-1.246875, -1.309375)),
                (7, 0, (2.82288125, 2.93225625)),
                (9, 1, (-1.41840234, -1.53949609)),
                (11, 0, (2.52296429, 2.64112835)),
            ],
        ),
    ],
    ids=["half", "rebase"],
)
def test_fragments_are_exchanged_during_training(make_pair, alpha, known):
    peers = make_pair(sync_every=4, fragments=2, fragment_sync_delay=1, fragment_update_alpha=alpha)
    applied = {step: (number, after) for step, number, after in known}
    for step in range(1, 12):
        in_parallel(*(peer.step for peer in peers))
        if step in applied:
            number, after = applied[step]
            for peer, expected in zip(peers, after, strict=True):
                near(peer.model[number], expected)
                assert peer.opt.last_round.fragment == number
    assert [peer.opt.local_epoch for peer in peers] == [5, 5]


def test_a_slow_peer_contributes_fewer_steps(make_pair):
    fast, slow = make_pair(sync_every=4, straggler_patience=0.5, outer_optimizer=PLAIN)
    for _ in range(2):
        slow.opt.zero_grad()
        (0.5 * (torch.cat(slow.parameters) - slow.target).square().sum()).backward()
        slow.opt.step(batch_size=2)

    def come():
        while slow.opt.local_epoch == 0:
            slow.opt.step(batch_size=0)

    in_parallel(lambda: [fast.step() for _ in range(4)], come)
    for peer in (fast, slow):
        near(peer.model, (1.8125, -1.0))
        assert sorted(peer.opt.last_round.weights) == [1.0, 2.0]


class Trainer:
    """A small network, its optimizer, and endless data."""

    def __init__(self, opt, model, seed):
        self.opt, self.model, self.rng = opt, model, torch.Generator().manual_seed(seed)
        self.seen = {}

    def step(self):
        """Make a step. Afterwards the trainer knows the bits of all versions that it has seen."""
        self.opt.zero_grad()
        backward(self.model, torch.randn(8, 6, generator=self.rng).to(next(self.model.parameters()).dtype))
        self.opt.step()
        self.look()

    def look(self):
        for number, (link, bits) in enumerate(self.opt.outer_versions()):
            self.seen[number, link] = bits

    def train_until(self, slot, pace=0.03):
        pause = threading.Event()
        while self.opt.local_epoch < slot:
            self.step()
            pause.wait(pace)

    @property
    def outer(self):
        with self.opt.use_outer_parameters():
            self.look()
            return values(self.model)


@pytest.fixture
def make_trainers(make_dhts, closing):
    def make(dhts, seeds=None, dtype=torch.float32, first=0, **options):
        made = []
        for index, dht in enumerate(dhts):
            model = make_model(seeds[index] if seeds else 0).to(dtype)
            inner = torch.optim.AdamW(model.parameters(), lr=0.01)
            defaults = {"sync_every": 4, "run_id": "run", "matchmaking_time": 5.0, "averaging_timeout": 20.0}
            opt = DiLoCo(dht=dht, optimizer=inner, **{"batch_size_per_step": 8, **defaults, **options})
            made.append(Trainer(closing(opt), model, first + index))
        return made

    return make


def links_of(trainer):
    return [link for link, _ in trainer.opt.outer_versions()]


def train_until_all_agree(*trainers, most=30):
    """All train, each at its own speed, until all were in the latest round and have the same updates behind them.

    That is looked at when all have come to the same slot, and have the results of their rounds.
    """
    for _ in range(most):
        slot = 2 + max(trainer.opt.local_epoch for trainer in trainers)
        in_parallel(*(functools.partial(trainer.train_until, slot) for trainer in trainers))
        in_parallel(*(lambda t=trainer: t.outer for trainer in trainers))
        if all_agree(*trainers):
            return
    raise AssertionError(f"they do not agree: {[(t.opt.last_round, links_of(t)) for t in trainers]}")


def all_agree(*trainers):
    """Whether all were in the latest round of all, and have the same outer parameters by their links."""
    rounds = [trainer.opt.last_round for trainer in trainers]
    came = all(r is not None and r.contributed and len(r.peers) == len(trainers) for r in rounds)
    return came and all(links_of(trainer) == links_of(trainers[0]) for trainer in trainers)


def check_same(*trainers):
    first, *others = [trainer.outer for trainer in trainers]
    for other in others:
        assert torch.equal(first, other)
    for number in range(len(trainers[0].opt.outer_optimizers)):
        states = [trainer.opt.outer_optimizers[number].state_dict()["state"] for trainer in trainers]
        for name, value in states[0].get(0, {}).items():
            assert all(torch.equal(value, state[0][name]) for state in states)


@pytest.mark.parametrize(
    "options",
    mostly_drills(
        [
            {"compression": NoCompression()},
            {"compression": BFloat16Compression(), "dtype": torch.bfloat16},
            {"compression": Float16Compression(), "return_compression": NoCompression(), "fragments": 3},
            {"fragments": 2, "fragment_sync_delay": None},
            {"compression": TopKCompression(density=1 / 8), "fragments": 2, "fragment_sync_delay": 1},
            {"compression": Float16Compression(), "error_feedback": 1.0},
            {"compression": Float16Compression()},
            {"compression": BlockwiseQuantization(), "fragments": 2},
            {"fragments": 2, "fragment_sync_delay": 1},
            {"compression": Blockwise4BitQuantization(), "fragments": 2},
            {"compression": TopKCompression(bits=8), "sparse_mean": "members"},
        ],
        quick=6,
    ),
    ids=[
        "float32",
        "bfloat16",
        "float16 and back float32",
        "when it is over",
        "sparse",
        "float16 with feedback",
        "float16",
        "8 bits",
        "delayed",
        "4 bits",
        "sparse of all members",
    ],
)
def test_all_peers_have_the_same_bits(make_dhts, make_trainers, options):
    trainers = make_trainers(make_dhts(3), **options)
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 6) for trainer in trainers))
    # One that begins late may miss the first updates. It makes up for them while it trains.
    train_until_all_agree(*trainers)
    check_same(*trainers)
    known = {}
    for trainer in trainers:
        assert all(known.setdefault(version, bits) == bits for version, bits in trainer.seen.items())
    assert len(known) >= 4
    assert not torch.equal(trainers[0].outer, values(make_model()))


@pytest.mark.parametrize("compression", [NoCompression(), Blockwise4BitQuantization()])
def test_an_untrained_layer_stays_as_it_is(make_dhts, make_trainers, compression):
    trainers = make_trainers(make_dhts(2), compression=compression)
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 4) for trainer in trainers))
    for trainer in trainers:
        trainer.model[0].requires_grad_(False)
    # The slots that have begun still hold what was trained before.
    last = 3 + max(trainer.opt.local_epoch for trainer in trainers)
    in_parallel(*(functools.partial(trainer.train_until, last) for trainer in trainers))
    then = [[p.detach().clone() for p in trainer.model.parameters()] for trainer in trainers]
    in_parallel(*(functools.partial(trainer.train_until, last + 4) for trainer in trainers))
    for trainer, before in zip(trainers, then, strict=True):
        frozen, trained = trainer.model[0].weight, trainer.model[2].weight
        torch.testing.assert_close(frozen.detach(), before[0], rtol=1e-6, atol=1e-8)
        assert not torch.allclose(trained.detach(), before[2], rtol=1e-3, atol=1e-4)


def test_alone_with_rate_1_it_trains_normally(make_dhts, make_trainers):
    (trainer,) = make_trainers(make_dhts(1), outer_optimizer=PLAIN, sync_every=3, compression=NoCompression())
    reference, rng = make_model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for _ in range(10):
        trainer.step()
        optimizer.zero_grad()
        backward(reference, torch.randn(8, 6, generator=rng))
        optimizer.step()
    torch.testing.assert_close(values(trainer.model), values(reference), rtol=1e-5, atol=1e-6)
    assert trainer.opt.local_epoch == 3


def test_a_newcomer_continues_from_the_others(make_dhts, make_trainers):
    dhts = make_dhts(3)
    options = {"fragments": 2, "scheduler": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)}
    old = make_trainers(dhts[:2], **options)
    introduce(*(trainer.opt for trainer in old))
    in_parallel(*(functools.partial(trainer.train_until, 4) for trainer in old))
    (new,) = make_trainers(dhts[2:], seeds=[7], first=2, **options)
    everybody = [*old, new]
    in_parallel(*(functools.partial(trainer.train_until, 14) for trainer in everybody))
    check_same(*everybody)
    assert all(len(trainer.opt.last_round.peers) == 3 for trainer in everybody)
    for trainer in everybody:
        trainer.step()
        assert trainer.opt.position > 28, "as far as rates know, it has made all steps of 14 slots"
        assert trainer.opt.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**trainer.opt.position)


def test_a_client_takes_part(make_dhts, make_trainers):
    trainers = make_trainers(make_dhts(3, clients=1), fragments=2)
    introduce(*(trainer.opt for trainer in trainers))
    train_until_all_agree(*trainers)
    check_same(*trainers)
    assert trainers[2].opt.client_mode


def test_first_peers_with_different_parameters_agree(make_dhts, make_trainers):
    trainers = make_trainers(make_dhts(2), seeds=[1, 2])
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 6) for trainer in trainers))
    check_same(*trainers)
    assert all(len(trainer.opt.last_round.peers) == 2 for trainer in trainers)


def test_a_dead_peer_is_not_waited_for_long(make_dhts, make_trainers):
    dhts = make_dhts(3)
    trainers = make_trainers(dhts, fragments=2, next_chunk_timeout=2.0)
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 3) for trainer in trainers))
    dhts[2].shutdown()  # without a goodbye from what is built on it
    rest = trainers[:2]
    in_parallel(*(functools.partial(trainer.train_until, 8) for trainer in rest))
    check_same(*rest)
    assert all(len(trainer.opt.last_round.peers) == 2 for trainer in rest)


def test_a_target_of_samples_instead_of_steps(make_dhts, make_trainers):
    options = {"sync_every": None, "target_batch_size": 64, "fragments": 2}
    trainers = make_trainers(make_dhts(2), **options)
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 5) for trainer in trainers))
    check_same(*trainers)
    assert all(len(trainer.opt.last_round.peers) == 2 for trainer in trainers)


def test_averaging_parameters_keeps_outer_parameters_of_each_peer(make_dhts, make_trainers):
    options = {"average": "parameters", "compression": NoCompression()}
    trainers = make_trainers(make_dhts(2), seeds=[1, 2], **options)
    introduce(*(trainer.opt for trainer in trainers))
    before = (trainers[0].outer - trainers[1].outer).norm()
    in_parallel(*(functools.partial(trainer.train_until, 6) for trainer in trainers))
    after = (trainers[0].outer - trainers[1].outer).norm()
    assert 0 < after < before / 2


def test_pairs_average_parameters_and_mix(make_dhts, make_trainers):
    """Nobody waits for the whole swarm, and models come together nevertheless."""
    options = {"average": "parameters", "averager_opts": {"target_group_size": 2}}
    trainers = make_trainers(make_dhts(4), seeds=[1, 2, 3, 4], **options)
    introduce(*(trainer.opt for trainer in trainers))
    before = [trainer.outer for trainer in trainers]
    for slot in range(10):
        # A fast pair goes on while others are at the slot before, and these have missed nothing nevertheless.
        paces = [0.01, 0.02, 0.04, 0.08]
        work = [functools.partial(t.train_until, slot + 1, pace) for t, pace in zip(trainers, paces, strict=True)]
        in_parallel(*work)
        assert [trainer.opt.last_round.slot for trainer in trainers] == [slot] * 4
    after = [trainer.outer for trainer in trainers]

    def spread(models):
        mean = sum(models) / 4
        return sum((model - mean).square().sum() for model in models)

    assert spread(after) < spread(before) / 4
    for trainer in trainers:
        assert len(trainer.opt.last_round.peers) == 2
        assert trainer.opt.last_round.bytes_sent == 2 * trainer.opt.averager.donor.fragments[0].vector.numel()


def test_gradients_of_the_model_are_not_touched(make_dhts, make_trainers):
    (trainer,) = make_trainers(make_dhts(1), sync_every=1)
    for _ in range(2):
        backward(trainer.model, torch.randn(8, 6, generator=trainer.rng))
        grads = [parameter.grad.clone() for parameter in trainer.model.parameters()]
        trainer.opt.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(trainer.model.parameters(), grads, strict=True))
        trainer.opt.zero_grad()


def test_outer_parameters_for_evaluation(make_dhts, make_trainers):
    (trainer,) = make_trainers(make_dhts(1), sync_every=4)
    trainer.step()
    own = values(trainer.model)
    with trainer.opt.use_outer_parameters():
        assert torch.equal(values(trainer.model), values(make_model()))
        with trainer.opt.use_outer_parameters():
            assert torch.equal(values(trainer.model), values(make_model()))
        assert torch.equal(values(trainer.model), values(make_model()))
        with pytest.raises(RuntimeError, match=r"holds the outer parameters.* before step\(\)"):
            trainer.step()
    assert torch.equal(values(trainer.model), own)
    for _ in range(2):
        trainer.opt.show_outer_parameters()
    assert torch.equal(values(trainer.model), values(make_model()))
    for _ in range(2):
        trainer.opt.show_own_parameters()
    assert torch.equal(values(trainer.model), own)
