"""Peers that lack updates make them themselves, from results that others have kept; newcomers get all the rest, too."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from shoal.averaging.state.download import GivenState, State
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import Blockwise4BitQuantization, NoCompression
from shoal.optim.diloco.catching_up import CatchingUp
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragments import ExtraTensors
from shoal.optim.diloco.messages import (
    Wanted,
    answer,
    packed,
    parse_answer,
    parse_request,
    request_for,
    unpacked,
)
from shoal.optim.diloco.outer_averager import OuterDonor
from shoal.optim.diloco.slots import Schedule, SlotCounter
from shoal.optim.history.journal import HASH_BYTES, Entry, Update
from shoal.optim.history.window import Relation
from shoal.p2p import PeerID
from tests.drills import mostly_drills
from tests.optim.conftest import in_parallel, make_model, wait_until
from tests.optim.diloco.quadratic import A, B
from tests.optim.diloco.test_diloco import Trainer, check_same, introduce, train_until_all_agree
from tests.optim.diloco.test_fragment_updates import Peer, alone, begin, land, make_round

pytestmark = pytest.mark.timeout(240)
LINK = bytes(HASH_BYTES)


def bits_of(tensor):
    return tensor.view(torch.int32)


def sparse(length, *positions):
    mean = torch.zeros(length)
    mean[list(positions)] = torch.rand(len(positions)) + 1e-30
    return mean


MEANS = {
    "half": torch.randn(100).half().float(),
    "bfloat16": (torch.randn(100) * 1e20).bfloat16().float(),
    "single": torch.randn(100),
    "sparse": sparse(100, 3, 50, 99),
    "zero": torch.zeros(100),
    "negative zeros": torch.full((100,), -0.0),
    "one value": torch.tensor([1 / 3]),
}


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("half", 200),
        ("bfloat16", 200),
        ("single", 400),
        ("sparse", 24),
        ("zero", 0),
        ("negative zeros", 200),
        ("one value", 4),
    ],
    ids=list(MEANS),
)
def test_a_packed_mean_loses_no_bit(name, nbytes):
    mean = MEANS[name].clone()
    kept = packed(mean)
    assert sum(tensor.nbytes for tensor in kept) == nbytes
    expected = mean.clone()
    mean.fill_(7)  # it was copied
    assert torch.equal(bits_of(unpacked(kept, len(expected))), bits_of(expected))


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(3)],
        [torch.zeros(4, dtype=torch.float64)],
        [torch.tensor([0.0, 0.0, 0.0, float("nan")])],
        [torch.tensor([4], dtype=torch.int32), torch.zeros(1)],
        [torch.tensor([-1], dtype=torch.int32), torch.zeros(1)],
        [torch.tensor([1, 2], dtype=torch.int32), torch.zeros(1)],
        [torch.tensor([1]), torch.zeros(1)],
    ],
    ids=[
        "none",
        "short",
        "wide",
        "not finite",
        "beyond the end",
        "before the begin",
        "more positions",
        "wide positions",
    ],
)
def test_a_mean_that_makes_no_sense_is_refused(tensors):
    with pytest.raises(ValueError, match="mean"):
        unpacked(tensors, 4)


def test_updates_travel_as_plain_values():
    kept = {
        0: [
            Update(3, LINK, b"a", 1, packed(MEANS["sparse"])),
            Update(4, LINK, b"b", 2, packed(MEANS["half"])),
        ],
        2: [],
    }
    state = answer(kept)
    metadata = MSGPackSerializer.loads(MSGPackSerializer.dumps(state.metadata))
    found = parse_answer(metadata, state.tensors, 3)
    assert list(found) == [0]
    assert [each[:4] for each in found[0]] == [(3, LINK, b"a", 1), (4, LINK, b"b", 2)]
    assert torch.equal(unpacked(found[0][0].tensors, 100), MEANS["sparse"])
    wanted = {1: Wanted(7), 0: Wanted(2, Entry(4, LINK, 9))}
    assert parse_request(request_for(wanted), 2) == wanted


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"\xc1",
        MSGPackSerializer.dumps([[2, 0, None]]),
        MSGPackSerializer.dumps([[0, -1, None], "a", [0, "b", None], [0, 1]]),
        MSGPackSerializer.dumps([[0, 0, [1, b"short", 1]], [1, 0, 5]]),
    ],
    ids=["empty", "no message", "no such fragment", "other values", "no link"],
)
def test_a_malformed_request_asks_for_nothing(part):
    assert parse_request(part, 2) == {}


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"updates": 3},
        {"updates": [[1, 1, LINK, b"a", 1, b"", 1]]},
        {"updates": [[0, 1, b"short", b"a", 1, b"", 1]]},
        {"updates": [[0, 1, LINK, bytes(200), 1, b"", 1]]},
        {"updates": [[0, 1, LINK, b"a", 1, b"", 3]]},
        {"updates": [[0, 1, LINK, b"a", 1, bytes(2**16 + 1), 1]]},
        {"updates": [[0, 1, LINK, b"a", 1, b"", 1], [0, 3, LINK, b"a", 1, b"", 1]]},
        {"updates": [[0, n, LINK, b"a", 1, b"", 1] for n in (1, 2, 3)]},
    ],
    ids=[
        "none",
        "no list",
        "fragment",
        "hash",
        "round",
        "three tensors",
        "names",
        "a gap",
        "too few tensors",
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(metadata):
    with pytest.raises(ValueError, match=r"no update|updates must"):
        parse_answer(metadata, [torch.zeros(2), torch.zeros(2)], 1)


def giving(*peers):
    fragments = [peer.updates for peer in peers]
    inner = SimpleNamespace(parameters=[each for own in fragments for each in own.fragment.parameters], names=[])
    return OuterDonor(
        SlotCounter(Schedule(len(peers), 2)), fragments, threading.RLock(), inner, False, ExtraTensors(())
    )


def no_updates(part, timeout):
    fetching = concurrent.futures.Future()
    fetching.set_result(State(*answer({})[:2]))
    return fetching


def rounds_of(peer, ask):
    """What catching up needs of rounds."""
    tracker = SimpleNamespace(
        pause_updates=nullcontext,
        global_epoch=3,
        is_first=lambda: False,
        fetched_global_progress_this_epoch=threading.Event(),
    )
    tracker.fetched_global_progress_this_epoch.set()
    return SimpleNamespace(
        fragments=[peer.updates],
        has_trained=True,
        begin_run=lambda: None,
        end_flights=lambda: None,
        tracker=tracker,
        counter=SimpleNamespace(slot=3, position=0, schedule=Schedule(1, 2)),
        settings=replace(peer.updates.settings, load_state_timeout=1.0, share_inner_state=False),
        averager=SimpleNamespace(load_part_from_peers=ask, donor=giving(peer), is_giving=False),
        go_to=lambda slot: None,
        inner=SimpleNamespace(move_schedules=lambda position: None),
    )


def test_a_donor_without_known_updates_refuses():
    """Else most, who have nothing, would outvote the few who have it."""
    a, b = Peer(A), Peer(B)
    a.train()
    alone(0, a)
    wanted = {0: Wanted(0, a.updates.journal.newest)}
    assert giving(b).part(request_for(wanted)) is None
    found = parse_answer(*giving(a).part(request_for(wanted))[:2], 1)
    assert [each.version for each in found[0]] == [1]
    state = giving(b).part(request_for({0: Wanted(0)}))
    assert parse_answer(state.metadata, state.tensors, 1) == {}, "nobody knows whether there is anything"


def test_too_old_updates_are_not_denied():
    peer = Peer(A)
    for slot in range(4):
        peer.train()
        alone(slot, peer)
    assert giving(peer).part(request_for({0: Wanted(0)})) is None
    state = giving(peer).part(request_for({0: Wanted(4)}))
    assert parse_answer(state.metadata, state.tensors, 1) == {}


def test_an_older_state_is_refused(caplog):
    """It is the only one that can be reached now and then, when others have just died."""
    newcomer, old, peer = Peer(A), Peer(B), Peer(A)
    for slot in range(3):
        old.train()
        alone(slot, old)
    donors = {donor: giving(each) for donor, each in ((PeerID(b"new"), newcomer), (PeerID(b"old"), old))}
    donors[PeerID(b"old")].counter.go_to(3)
    left_out = []

    def download(timeout, skip):
        for donor, each in donors.items():
            if donor not in skip:
                state = GivenState(*each.everything()[:2])
                state.donor, state.version = donor, b""
                return state
        return None

    rounds = rounds_of(peer, no_updates)
    rounds.has_trained, rounds.counter.slot, rounds.lock = False, 0, threading.RLock()
    rounds.averager.load_state_from_peers = download
    rounds.averager.leave_out = lambda donor, version: left_out.append(donor)
    assert CatchingUp(rounds).run()
    assert peer.updates.journal.entries == old.updates.journal.entries
    assert "it is of slot 0, and the swarm was at slot 3" in caplog.text
    assert not left_out, "it may have the right one a moment later"


def test_a_loser_takes_over_the_winning_branch(caplog):
    winner, loser = Peer(A), Peer(B)
    for peer in (winner, loser):
        peer.train()
        alone(0, peer)
    winner.train()
    alone(1, winner)
    loser.train()
    of_loser, of_winner = (peer.updates.statement(2) for peer in (loser, winner))
    loser.updates.begin(2)
    assert loser.updates.judge([of_loser, of_winner], 0, b"first") is False
    assert list(land([loser], [0.0], loser.vector)) == [None]
    assert loser.updates.standing is Relation.ELSEWHERE
    rounds = rounds_of(loser, no_updates)
    rounds.lock, rounds.averager.leave_out = threading.RLock(), None
    donor = giving(winner)
    donor.counter.go_to(3)
    rounds.averager.load_state_from_peers = lambda timeout, skip: State(*donor.everything()[:2])
    assert CatchingUp(rounds).run()
    assert loser.updates.journal.entries == winner.updates.journal.entries
    assert torch.equal(loser.model, winner.outer), "it starts over"
    assert "up to 1 updates of this peer are lost" in caplog.text


def test_updates_that_do_not_fit_are_refused(caplog):
    peer = Peer(A)
    link = peer.updates.journal.newest.hash
    kept = Update(1, link, b"a", 1, (torch.tensor([math.nan, 0.0]),))
    fetching = concurrent.futures.Future()
    fetching.set_result(State(*answer({0: [kept]})[:2]))
    catching_up = CatchingUp(rounds_of(peer, lambda part, timeout: fetching))
    peer.updates.may_lack_updates = True
    catching_up.keep_up()  # asks
    catching_up.keep_up()  # has the answer
    assert "are malformed: a mean has values that are not finite" in caplog.text
    assert peer.updates.journal.newest.version == 0


def test_made_up_updates_give_the_same_bits():
    a, b = Peer(A), Peer(B)
    for slot in range(2):
        a.train()
        b.train()
        alone(slot, a)
    made = b.updates.make_up(a.updates.journal.since(0))
    assert made == 2
    assert torch.equal(a.outer, b.outer)
    assert a.updates.journal.entries == b.updates.journal.entries
    assert all(map(torch.equal, a.updates.state.dump()[1], b.updates.state.dump()[1]))
    assert b.updates.contribution.age == 2  # what it has done is worth less now, but it counts
    assert b.updates.contribution.effort.steps == 4
    (_, of_b), _ = make_round(2, a, b)
    assert of_b.contributed
    assert of_b.staleness == 2


def test_a_straggler_keeps_the_result_for_later():
    a, b, c = Peer(A), Peer(B), Peer(A)
    for peer in (a, b, c):
        peer.train()
    make_round(0, a, c)
    a.train()
    c.train()
    weights, mean = begin(1, [a, b, c])
    assert weights[1] == 0
    told = list(land([a, b, c], weights, mean))
    assert told[1] is None
    assert b.updates.standing is Relation.BEHIND
    assert b.updates.lacks_updates
    # Others may be asked before they have made the update of this round.
    assert b.updates.make_up(a.updates.journal.since(0)[:1]) == 2
    assert b.updates.standing is Relation.WITH
    assert torch.equal(a.outer, b.outer)
    assert a.updates.journal.newest == b.updates.journal.newest


@pytest.mark.parametrize("codec", [None, Blockwise4BitQuantization()], ids=["all", "4 bits"])
@pytest.mark.parametrize(("mixing", "delay"), [(0.0, 0), ("rebase", 3), (0.5, 0)], ids=["at once", "later", "half"])
def test_a_counted_message_does_not_count_again(mixing, delay, codec):
    a, b = (Peer(target, mixing=mixing, delay=delay, codec=codec) for target in (A, B))
    for peer in (a, b):
        peer.train()
    weights, mean = begin(0, [a, b])
    next(land([a, b], weights, mean))
    sent, left = b.model, None if codec is None else b.updates.flight.message.left_out.clone()
    b.updates.give_up()
    b.train(1)
    before = b.model
    kept = a.updates.journal.since(0)
    described = answer({0: kept})
    found = parse_answer(described.metadata, described.tensors, 1)
    assert b.updates.make_up(found[0]) == 1
    assert torch.equal(a.outer, b.outer)
    assert b.updates.contribution.effort.steps == 1
    assert b.updates.contribution.age == 0
    torch.testing.assert_close(b.model, a.outer + before - sent)
    if codec is not None:
        assert torch.equal(b.updates.contribution.error, left)
    b.train(1)
    a.train()
    alone(1, a)
    assert b.updates.make_up(a.updates.journal.since(1)) == 1  # this one has nothing of it
    assert (b.updates.contribution.effort.steps, b.updates.contribution.age) == (2, 1)


def test_a_late_message_counts_next_time():
    a, b = Peer(A), Peer(B)
    for peer in (a, b):
        peer.train()
    weights, mean = begin(0, [a, b])
    next(land([a, b], weights, mean, late=[b]))
    b.updates.give_up()
    before, outer = b.model, b.outer
    assert b.updates.make_up(a.updates.journal.since(0)) == 1
    assert (b.updates.contribution.effort.steps, b.updates.contribution.age) == (2, 1)
    torch.testing.assert_close(b.model, before + a.outer - outer)


def test_updates_of_another_lineage_are_left_out():
    a, b = Peer(A), Peer(B)
    for peer in (a, b):
        peer.train()
        alone(0, peer)
    a.train()
    alone(1, a)
    before = b.outer
    assert b.updates.make_up(a.updates.journal.since(1)) == 0
    assert torch.equal(b.outer, before)


def test_an_idle_peer_continues_from_outer_parameters():
    a, b = Peer(A), Peer(B)
    a.train()
    alone(0, a)
    b.updates.make_up(a.updates.journal.since(0))
    assert torch.equal(b.model, a.outer)
    assert b.updates.contribution.age == 0


# --- between real peers -----------------------------------------------------------------------------------------------


@pytest.fixture
def make(closing):
    def make(dht, seed=0, **options):
        model = make_model(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        defaults = {"sync_every": 4, "run_id": "run", "matchmaking_time": 5.0, "averaging_timeout": 20.0}
        opt = DiLoCo(dht=dht, optimizer=inner, **{"batch_size_per_step": 8, **defaults, **options})
        return Trainer(closing(opt), model, seed)

    return make


def count_downloads(trainer, monkeypatch):
    """Count what a peer downloads: whole states, and parts of them."""
    counts, averager = {"whole": 0, "parts": 0}, trainer.opt.averager
    whole, part = averager.load_state_from_peers, averager.load_part_from_peers

    def load_whole(*args, **options):
        counts["whole"] += 1
        return whole(*args, **options)

    def load_part(*args, **options):
        counts["parts"] += 1
        return part(*args, **options)

    monkeypatch.setattr(averager, "load_state_from_peers", load_whole)
    monkeypatch.setattr(averager, "load_part_from_peers", load_part)
    return counts


@pytest.mark.parametrize("delay", mostly_drills([3, None]), ids=["a whole slot", "when it is over"])
def test_a_newcomer_joins_between_overlapping_rounds(make_dhts, make, monkeypatch, delay):
    dhts = make_dhts(3)
    old = [make(dht, fragment_sync_delay=delay) for dht in dhts[:2]]
    introduce(*(trainer.opt for trainer in old))
    in_parallel(*(functools.partial(trainer.train_until, 4) for trainer in old))
    new = make(dhts[2], seed=7, fragment_sync_delay=delay)
    counts = count_downloads(new, monkeypatch)
    everybody = [*old, new]
    train_until_all_agree(*everybody)
    assert counts["whole"] == 1
    check_known_bits(*everybody)


def check_known_bits(*trainers):
    """Whatever versions two of them have both seen, they have seen with the same bits."""
    known = {}
    for trainer in trainers:
        assert all(known.setdefault(version, bits) == bits for version, bits in trainer.seen.items())


def test_a_missed_slot_costs_only_its_update(make_dhts, make, monkeypatch):
    dhts = make_dhts(3)
    options = {"fragments": 2, "straggler_patience": 0.3, "compression": NoCompression(), "matchmaking_time": 1.0}
    trainers = [make(dht, **options) for dht in dhts]
    introduce(*(trainer.opt for trainer in trainers))
    in_parallel(*(functools.partial(trainer.train_until, 3) for trainer in trainers))
    *busy, paused = trainers
    counts = count_downloads(paused, monkeypatch)
    in_parallel(*(functools.partial(trainer.train_until, 5) for trainer in busy))
    wait_until(lambda: paused.opt.tracker.global_epoch >= 5, "it hears of the others' slot")
    train_until_all_agree(*trainers)
    assert counts["whole"] == 0
    assert counts["parts"] >= 1
    check_known_bits(*trainers)
    check_same(*trainers)
