"""Checkpoints of DiLoCo: who loads one goes on as if it had never stopped, to the bit, and learns what does not fit."""

from __future__ import annotations

import functools
import io

import pytest
import torch

from shoal.averaging import RoundResult, StepControl
from shoal.compression import Blockwise4BitQuantization, BlockwiseQuantization, NoCompression
from shoal.optim.diloco.checkpoint import OuterCheckpoint
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.slots import Schedule, SlotCounter
from tests.drills import mostly_drills
from tests.optim.conftest import backward, in_parallel, make_model, values, wait_until
from tests.optim.diloco.quadratic import A, B
from tests.optim.diloco.test_diloco import Trainer, check_same, introduce, train_until_all_agree
from tests.optim.diloco.test_fragment_updates import Peer, begin

pytestmark = pytest.mark.timeout(240)
STEPS = 11


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def two_optimizers(model):
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.Adam(others, lr=0.01)]


def decay(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


class Alone:
    """A peer without others, whose batches depend on nothing but how many it has had."""

    def __init__(self, dht, run_id, optimizer=adam, dtype=torch.float32, seed=0, **options):
        self.model = make_model(seed).to(dtype)
        defaults = {"sync_every": 4, "batch_size_per_step": 8, "compression": NoCompression()}
        self.opt = DiLoCo(dht=dht, run_id=run_id, optimizer=optimizer(self.model), **{**defaults, **options})
        self.steps = 0

    def train(self, until):
        while self.steps < until:
            if (tracker := self.opt.tracker).local_progress.samples_accumulated:
                # It looks for others in the background before its first slot ends: how long that takes must not matter.
                wait_until(lambda: tracker.is_introduced, "the peer has looked for others")
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.steps))
            self.opt.zero_grad()
            backward(self.model, batch.to(next(self.model.parameters()).dtype))
            self.opt.step()
            self.steps += 1

    def save(self):
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.opt.state_dict(), "steps": self.steps}, file)
        return file.getvalue()

    def load(self, saved):
        saved = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.opt.load_state_dict(saved["optimizer"])
        self.steps = saved["steps"]
        return self

    @property
    def everything(self):
        """The model, all outer parameters with their links, and the statistics of all optimizers."""
        inner = self.opt.state_dict()
        states = [each["state"] for each in inner.get("optimizers", [inner])]
        states += [optimizer.state_dict()["state"] for optimizer in self.opt.outer_optimizers]
        tensors = [t for state in states for each in state.values() for t in each.values() if torch.is_tensor(t)]
        rates = [group["lr"] for group in self.opt.param_groups]
        place = self.opt.local_epoch, self.opt.inner_steps, rates
        return values(self.model), self.opt.outer_versions(), [t.clone() for t in tensors], place


def check_equal(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1] == other[1]
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    assert one[3] == other[3]


@pytest.mark.parametrize(
    "options",
    mostly_drills(
        [
            {"optimizer": two_optimizers, "scheduler": decay},
            {"sync_every": None, "target_batch_size": 24},
            {"fragment_sync_delay": 2, "compression": Blockwise4BitQuantization()},
            {"fragments": 2, "fragment_sync_delay": 3, "fragment_update_alpha": 0.5},
            {"scheduler": decay},
            {"dtype": torch.bfloat16, "fragments": 3},
            {"fragments": 2, "fragment_sync_delay": 2},
            {"fragments": 2, "fragment_sync_delay": None, "compression": BlockwiseQuantization()},
            {"average": "parameters"},
        ],
        quick=2,
    ),
    ids=["two", "samples", "4 bits", "half", "one", "bfloat16", "delayed", "when it is over", "parameters"],
)
def test_resuming_is_like_never_stopping(make_dhts, closing, options):
    (dht,) = make_dhts(1)
    peer, saved = Alone(dht, "whole", **options), {}
    closing(peer.opt)
    for step in range(1, STEPS + 1):
        peer.train(step)
        if step in (3, 6, 10):
            saved[step] = peer.save()
    for step, checkpoint in saved.items():
        resumed = Alone(dht, f"from_{step}", seed=5, **options)
        closing(resumed.opt)
        resumed.load(checkpoint).train(STEPS)
        check_equal(resumed.everything, peer.everything)


def test_saving_changes_and_waits_for_nothing():
    peer = Peer(A, delay=2)
    peer.train()
    flight = peer.updates.begin(0)
    flight.control = StepControl(0.0)  # it never ends
    before = peer.model, peer.outer, peer.vector.clone()
    schedule = Schedule(sync_every=2)
    saved = OuterCheckpoint.dump(SlotCounter(schedule, 1, 0, 0, 2), "pseudo_gradients", [peer.updates])
    assert peer.updates.flight is flight
    assert all(map(torch.equal, before, (peer.model, peer.outer, peer.vector)))
    other = Peer(A)
    parsed = OuterCheckpoint.parse(saved, "pseudo_gradients", schedule, [other.updates])
    parsed.fragments[0].put_in_place(other.updates)
    assert other.updates.flight is None  # what it was about to send is sent next time
    assert other.updates.contribution.effort == peer.updates.contribution.effort


def test_a_result_not_yet_applied_is_saved():
    peer, other = Peer(A, delay=2), Peer(A, delay=2)
    peer.train()
    peer.updates.begin(0)
    peer.train(1)
    args = "pseudo_gradients", Schedule(sync_every=3)
    saved = OuterCheckpoint.dump(SlotCounter(args[1], 1, 1, 1, 3), args[0], [peer.updates])
    OuterCheckpoint.parse(saved, *args, [other.updates]).fragments[0].put_in_place(other.updates)
    with torch.no_grad():
        other.parameter.copy_(peer.parameter)
    for each in (peer, other):
        assert each.updates.flight.left == 1
        each.train(1)
        each.updates.land(each.updates.flight.result)
    assert torch.equal(peer.model, other.model)
    assert torch.equal(peer.outer, other.outer)
    assert peer.updates.journal.entries == other.updates.journal.entries


def test_a_saved_result_survives_a_new_id():
    """Unless its identity is kept in a file, a peer that starts again has a new one."""
    peer, other = Peer(A, delay=2), Peer(B, delay=2)
    peer.train()
    other.train()
    weights, mean = begin(0, [peer, other])
    peer.updates.flight.control = control = StepControl(0.0)
    ids = (peer.id, other.id)
    control.round = RoundResult(peer.group_id, ids, (), tuple(weights), 1.0, (), False, 0.1)
    control.set_result({})
    peer.vector.copy_(mean)
    args, again = ("pseudo_gradients", Schedule(sync_every=3)), peer
    for _ in range(2):
        saved = OuterCheckpoint.dump(SlotCounter(args[1], 1, 0, 0, 2), args[0], [again.updates])
        again = Peer(A, delay=2)
        OuterCheckpoint.parse(saved, *args, [again.updates]).fragments[0].put_in_place(again.updates)
    with torch.no_grad():
        again.parameter.copy_(peer.parameter)
    for each in (peer, again):
        told = each.updates.land(each.updates.flight.result)
        assert told.contributed
    assert peer.id != again.id
    assert torch.equal(peer.model, again.model)
    assert torch.equal(peer.outer, again.outer)
    assert peer.updates.journal.entries == again.updates.journal.entries
    assert peer.updates.contribution.effort == again.updates.contribution.effort


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fragments": 1}, "the checkpoint has 2 fragments, and this peer 1: give fragments="),
        ({"average": "parameters"}, "average='pseudo_gradients', and this peer has average='parameters'"),
        ({"optimizer": two_optimizers}, "1 inner optimizers, and this peer has 2: give optimizer="),
        ({"scheduler": decay}, "0 schedules, and this peer 1: give scheduler="),
        ({"outer_optimizer": torch.optim.Adam}, "keeps other statistics"),
    ],
    ids=["fragments", "average", "optimizers", "schedules", "outer optimizer"],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(make_dhts, closing, options, reason):
    (dht,) = make_dhts(1)
    peer, other = Alone(dht, "run", fragments=2), Alone(dht, "other", seed=1, **{"fragments": 2, **options})
    closing(peer.opt)
    closing(other.opt)
    peer.train(5)
    other.train(3)
    before = other.everything
    with pytest.raises(ValueError, match=reason):
        other.opt.load_state_dict(peer.opt.state_dict())
    check_equal(other.everything, before)


def test_a_checkpoint_of_another_model_or_of_none(make_dhts, closing):
    (dht,) = make_dhts(1)
    peer = Alone(dht, "run")
    closing(peer.opt)
    model = torch.nn.Linear(6, 2)
    other = closing(DiLoCo(dht=dht, run_id="other", optimizer=adam(model), sync_every=4, batch_size_per_step=8))
    with pytest.raises(ValueError, match="fragment 0 of the checkpoint has other parameters than this peer's"):
        other.load_state_dict(peer.opt.state_dict())
    whole = peer.opt.state_dict()
    whole["shoal"]["outer"]["fragments"][0]["layout"][0][0] = 4096
    with pytest.raises(ValueError, match="laid out for another codec: give compression= as when it was saved"):
        peer.opt.load_state_dict(whole)
    whole = peer.opt.state_dict()
    del whole["shoal"]["outer"]["fragments"][0]["chain"]
    with pytest.raises(ValueError, match="no list of 1 to 64 versions"):
        peer.opt.load_state_dict(whole)
    with pytest.raises(ValueError, match="no state of an optimizer"):
        peer.opt.load_state_dict({})
    with pytest.raises(ValueError, match="malformed, or of another version of shoal: KeyError"):
        peer.opt.load_state_dict({"shoal": {"outer": {}}})
    whole = peer.opt.state_dict()
    whole["shoal"]["outer"]["slot"] = -1
    with pytest.raises(ValueError, match="a checkpoint cannot have slot = -1"):
        peer.opt.load_state_dict(whole)


def test_other_lengths_of_slots_are_told(make_dhts, closing, caplog):
    (dht,) = make_dhts(1)
    peer, other = Alone(dht, "run"), Alone(dht, "other", sync_every=6)
    closing(peer.opt)
    closing(other.opt)
    peer.train(5)
    other.load(peer.save())
    assert "other settings: sync_every was 4 and is 6" in caplog.text
    assert other.opt.local_epoch == 1


def test_error_feedback_is_saved(make_dhts, closing, caplog):
    (dht,) = make_dhts(1)
    coarse = {"compression": Blockwise4BitQuantization()}
    peer, other, plain = Alone(dht, "run", **coarse), Alone(dht, "other", **coarse), Alone(dht, "plain")
    for each in (peer, other, plain):
        closing(each.opt)
    peer.train(5)
    saved = peer.opt.state_dict()
    (fragment,) = saved["shoal"]["outer"]["fragments"]
    fragment["error"] = torch.randn_like(fragment["tensors"][0])  # as after a round with others
    other.opt.load_state_dict(saved)
    (again,) = other.opt.state_dict()["shoal"]["outer"]["fragments"]
    assert torch.equal(again["error"], fragment["error"])
    assert not caplog.text
    plain.opt.load_state_dict(saved)
    assert "there was error feedback and is none" in caplog.text


def test_saving_while_the_model_shows_outer_parameters(make_dhts, closing):
    """Such as in a validation: the model that is saved is the one to publish, and training goes on all the same."""
    (dht,) = make_dhts(1)
    peer, resumed = Alone(dht, "run", fragments=2), Alone(dht, "again", fragments=2, seed=5)
    for opt in (peer.opt, resumed.opt):
        closing(opt)
    peer.train(7)
    with peer.opt.use_outer_parameters():
        saved, published = peer.save(), values(peer.model)
    assert not torch.equal(published, values(peer.model))
    resumed.model.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True)["model"])
    assert torch.equal(values(resumed.model), published)
    resumed.load(saved)
    check_equal(resumed.everything, peer.everything)
    for each in (peer, resumed):
        each.train(STEPS)
    check_equal(resumed.everything, peer.everything)
    broken = torch.load(io.BytesIO(saved), weights_only=True)["optimizer"]
    broken["shoal"]["model"].pop()
    with pytest.raises(ValueError, match="it is of another model"):
        resumed.opt.load_state_dict(broken)
    check_equal(resumed.everything, peer.everything)


def test_a_plain_optimizers_checkpoint_brings_statistics(make_dhts, closing):
    (dht,) = make_dhts(1)
    model = make_model(3)
    plain = adam(model)
    for _ in range(3):
        backward(model, torch.randn(8, 6))
        plain.step()
    peer = Alone(dht, "run")
    closing(peer.opt)
    peer.opt.load_state_dict(plain.state_dict())
    peer.model.load_state_dict(model.state_dict())
    with peer.opt.use_outer_parameters():
        assert torch.equal(values(peer.model), values(model))  # they begin as the model's when training begins
    assert all(map(torch.equal, *([s["exp_avg"] for s in o.state.values()] for o in (plain, peer.opt))))
    peer.train(5)


def test_a_resumed_peer_makes_up_missed_updates(make_dhts, closing):
    dhts = make_dhts(2)
    made = []
    for index, dht in enumerate(dhts):
        model = make_model()
        opt = DiLoCo(
            dht=dht,
            run_id="run",
            optimizer=adam(model),
            sync_every=4,
            batch_size_per_step=8,
            matchmaking_time=5.0,
            fragments=2,
        )
        made.append(Trainer(closing(opt), model, index))
    stays, leaves = made
    introduce(stays.opt, leaves.opt)
    in_parallel(*(functools.partial(trainer.train_until, 4) for trainer in made))
    saved = leaves.opt.state_dict()
    model = make_model()
    model.load_state_dict(leaves.model.state_dict())
    leaves.opt.shutdown()
    stays.train_until(7)
    opt = DiLoCo(
        dht=dhts[1],
        run_id="run",
        optimizer=adam(model),
        sync_every=4,
        batch_size_per_step=8,
        matchmaking_time=5.0,
        fragments=2,
    )
    comes_back = Trainer(closing(opt), model, 1)
    opt.load_state_dict(saved)
    assert opt.local_epoch == 4
    both = stays, comes_back
    train_until_all_agree(*both)
    check_same(*both)
    assert opt.local_epoch > 7
