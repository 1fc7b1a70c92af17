"""One fragment at several peers, without a network: what counts, what is made up for, and what changes nothing."""

from __future__ import annotations

import functools
import os
import threading

import pytest
import torch

from shoal.averaging import RoundResult, StepControl
from shoal.averaging.message_means import mean_of_messages
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import Blockwise4BitQuantization, CompressionInfo, TopKCompression
from shoal.errors import AllreduceException
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.diloco.fragment_updates import FragmentUpdates
from shoal.optim.diloco.fragments import Fragment, OuterState, default_outer_optimizer
from shoal.optim.diloco.messages import Effort, answer, parse_answer, usual_staleness
from shoal.optim.diloco.settings import OuterSettings
from shoal.optim.history.journal import MOST
from shoal.optim.history.window import Relation
from shoal.optim.options import with_defaults
from shoal.peers.identity import Identity
from tests.optim.diloco.quadratic import A, B, near, train


class Peer:
    """A fragment of two parameters that are pulled towards a point."""

    def __init__(
        self, target, start=(0.0, 0.0), factory=None, mixing=0.0, average="pseudo_gradients", delay=0, codec=None
    ):
        self.id = Identity.generate().peer_id
        self.target = target
        self.parameter = torch.nn.Parameter(torch.tensor(start))
        fragment = Fragment.of([self.parameter])
        state = OuterState(fragment.read(), factory or default_outer_optimizer(average))
        options = {
            "run_id": "run",
            "sync_every": 5,
            "fragment_update_alpha": mixing,
            "fragment_sync_delay": delay,
            "average": average,
            "check_every": 2,
            "compression": codec,
        }
        settings = OuterSettings.resolve(**with_defaults(DiLoCo, options))
        self.updates = FragmentUpdates(0, fragment, state, settings, threading.RLock(), self.id)
        self.group_id = b""
        self.vector = self.updates.vector

    def train(self, steps=2, samples=1):
        for _ in range(steps):
            train(self.parameter, self.target, 1)
            self.updates.count(samples)

    @property
    def model(self):
        return self.parameter.detach().clone()

    @property
    def outer(self):
        return self.updates.state.values.clone()


def begin(slot, peers, expected=None):
    """All begin a round; returns their weights, and the mean of what they would send."""
    statements, weights, group_id = [], [], os.urandom(20)
    for peer in peers:
        peer.group_id = group_id
        flight = peer.updates.begin(slot)
        weights.append(flight.weight)
        statements.append(peer.updates.statement(expected or len(peers)))
    for index, peer in enumerate(peers):
        weights[index] *= peer.updates.judge(statements, index, group_id)
    total = sum(weight * peer.vector for weight, peer in zip(weights, peers, strict=True))
    return weights, total / sum(weights)


def land(peers, weights, mean, late=(), share=1.0, here=None):
    """Those ``here`` have the result; default: all."""
    for peer in here or peers:
        told = tuple(0.0 if each in late else w for each, w in zip(peers, weights, strict=True))
        ids = tuple(each.id for each in peers)
        result = RoundResult(peer.group_id, ids, (), told, share, (), peer in late, 0.1)
        peer.vector.copy_(mean)
        yield peer.updates.land(result)


def make_round(slot, *peers, **how):
    weights, mean = begin(slot, peers)
    return [*land(peers, weights, mean, **how)], mean


def alone(slot, peer):
    peer.updates.begin(slot)
    return peer.updates.land(None)


def test_missed_work_counts_in_the_next_round():
    a, b = Peer(A), Peer(B)
    a.train()
    b.train()
    alone(0, a)
    near(a.outer, (0.9975, 0))
    metadata, tensors = a.updates.dump()
    b.updates.check(metadata, tensors)
    assert b.updates.take_over(metadata, [tensor.clone() for tensor in tensors], is_new=False) == 0
    near(b.model, (3.2475, -1.5))
    assert b.updates.contribution.age == 1
    a.train()
    b.train()
    (of_a, of_b), mean = make_round(1, a, b)
    near(mean, (-0.730804281, 0.662912607))
    assert (of_a.staleness, of_b.staleness) == (0, 1)
    for peer in (a, b):
        near(peer.outer, (2.39471969, -0.881673768))
        assert peer.updates.contribution.age == 0
    a.train()
    b.train()
    _, mean = make_round(2, a, b)
    near(mean, (0.29603977, 0.0887446742))
    near(b.model, (2.79807783, -1.37557563))


def test_weights_are_mean_batches():
    a, b = (Peer(target, factory=functools.partial(torch.optim.SGD, lr=1.0)) for target in (A, B))
    for slot, expected in enumerate([(1.8125, -1.0), (2.15234375, -1.1875), (2.21606445, -1.22265625)]):
        a.train(4, samples=1)
        b.train(2, samples=2)
        (told, _), _ = make_round(slot, a, b)
        assert told.weights == (1.0, 2.0)
        near(a.model, expected)
        assert torch.equal(a.model, b.model)


def test_noloco_of_a_pair():
    a, b = Peer(A, average="parameters"), Peer(B, (1.0, -1.0), average="parameters")
    for slot, (theta_a, theta_b, phi_a, phi_b) in enumerate(
        [
            ((0.75, 0.0), (2.5, -1.75), (1.1375, -0.6125), (1.4375, -0.9125)),
            ((1.034375, -0.153125), (2.609375, -1.728125), (2.1853125, -1.1484375), (1.9253125, -0.8884375)),
            (
                (1.29632813, -0.287109375),
                (2.73132813, -1.72210938),
                (2.58917969, -1.31572656),
                (2.23117969, -0.957726563),
            ),
        ]
    ):
        a.train()
        b.train()
        near(a.model, theta_a)
        near(b.model, theta_b)
        make_round(slot, a, b)
        near(a.outer, phi_a)
        near(b.outer, phi_b)
        near(a.model, phi_a)


def test_both_averages_agree_from_equal_parameters():
    factory = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.5)
    pairs = [
        [Peer(t, factory=factory, average=average) for t in (A, B)] for average in ("parameters", "pseudo_gradients")
    ]
    for slot in range(4):
        for pair in pairs:
            for peer in pair:
                peer.train()
            make_round(slot, *pair)
        torch.testing.assert_close(pairs[0][0].outer, pairs[1][0].outer)


def test_a_late_peers_work_counts_next_time():
    a, b = Peer(A), Peer(B)
    a.train()
    b.train()
    before = b.model - b.outer
    (of_a, of_b), _ = make_round(0, a, b, late=(b,))
    assert of_a.contributed
    assert not of_b.contributed
    assert torch.equal(a.outer, b.outer)
    torch.testing.assert_close(b.model - b.outer, before)
    assert b.updates.contribution.effort == Effort(2, 2)
    assert (a.updates.contribution.age, b.updates.contribution.age) == (0, 1)


@pytest.mark.parametrize("broken", ["share", "weights", "values"])
def test_a_round_without_a_whole_result_changes_nothing(broken):
    a, b = Peer(A), Peer(B)
    a.train()
    b.train()
    before = a.model, a.outer, a.updates.contribution.effort, a.updates.journal.entries
    weights, mean = begin(0, (a, b))
    if broken == "values":
        mean[0] = float("nan")
    weights = [0.0, 0.0] if broken == "weights" else weights
    assert next(land((a, b), weights, mean, share=0.9 if broken == "share" else 1.0)) is None
    assert torch.equal(a.model, before[0])
    assert torch.equal(a.outer, before[1])
    assert (a.updates.contribution.effort, a.updates.journal.entries) == before[2:]
    assert a.updates.flight is None
    b.updates.give_up()
    make_round(1, a, b)
    assert a.updates.state.version == 1


def test_without_a_majority_there_is_no_round():
    a, b = Peer(A), Peer(B)
    with pytest.raises(AllreduceException, match="only 2 of 4"):
        begin(0, (a, b), expected=4)
    for peer in (a, b):
        peer.updates.give_up()
    begin(0, (a, b), expected=3)


def test_only_the_majority_of_a_split_round_updates():
    peers = [Peer(A), Peer(B), Peer(A), Peer(B)]
    for peer in peers:
        peer.train()
    weights, mean = begin(0, peers)
    alone, others = peers[:1], peers[1:]
    assert [*land(peers, weights, mean, late=others, here=alone)] == [None]
    assert peers[0].updates.may_lack_updates
    told = [*land(peers, weights, mean, late=alone, here=others)]
    assert [each.version for each in told] == [1, 1, 1]


@pytest.mark.parametrize(("side", "versions"), [([0, 1], [1, 1]), ([2, 3], [0, 0])])
def test_the_half_with_the_first_member_updates(side, versions):
    peers = [Peer(A), Peer(B), Peer(A), Peer(B)]
    for peer in peers:
        peer.train()
    weights, mean = begin(0, peers)
    here = [peers[n] for n in side]
    list(land(peers, weights, mean, late=[peer for peer in peers if peer not in here], here=here))
    assert [peer.updates.state.version for peer in here] == versions


def test_idle_members_are_no_part_of_the_majority():
    a, b, c = Peer(A), Peer(B), Peer(B)
    a.train()
    told, _ = make_round(0, a, b, c)
    assert [each.version for each in told] == [1, 1, 1], "two have trained nothing yet"


def test_two_results_of_one_round_are_two_lineages():
    """The sides of a split may each have counted other members: whoever has which is told by the chain."""
    a, b, c = Peer(A), Peer(B), Peer(A)
    for peer in (a, b, c):
        peer.train()
    weights, mean = begin(0, (a, b, c))
    for one, lost in ((a, c), (b, a)):
        list(land((a, b, c), weights, mean, late=(lost,), here=(one,)))
    assert a.updates.journal.newest.version == b.updates.journal.newest.version == 1
    assert a.updates.journal.newest.hash != b.updates.journal.newest.hash


def test_members_behind_make_no_second_update():
    a, b, c, d = Peer(A), Peer(B), Peer(B), Peer(A)
    for peer in (a, b, c, d):
        peer.train()
    make_round(0, a, d)
    begun = begin(1, (a, b, c, d))
    list(land((a, b, c, d), *begun))
    assert b.updates.standing is c.updates.standing is Relation.BEHIND
    assert begin(2, (b, c))[0] == [0.0, 0.0], "a has the update that they would make anew"
    for peer in (b, c):
        peer.updates.give_up()
        assert peer.updates.standing is Relation.BEHIND
        peer.updates.make_up(a.updates.journal.since(0))
        assert peer.updates.standing is Relation.WITH
        assert torch.equal(peer.outer, a.outer)


def test_others_follow_the_member_ahead():
    a, b, c = Peer(A), Peer(B), Peer(B)
    for peer in (a, b, c):
        peer.train()
    make_round(0, a)
    a.train()
    weights, mean = begin(1, (a, b, c))
    assert weights == [1.0, 0.0, 0.0]
    assert [each and each.version for each in land((a, b, c), weights, mean)] == [2, None, None]
    for peer in (b, c):
        assert peer.updates.heard_of == a.updates.journal.newest, "it was in the round"
        assert peer.updates.make_up(a.updates.journal.since(0)[:1]) == 2, "it has kept the result of the round"
        assert peer.updates.heard_of is None
        assert torch.equal(peer.outer, a.outer)


def test_a_state_replaces_too_many_updates():
    """What it has done meanwhile counts next time, as if it had made the updates one by one."""
    a, b = Peer(A), Peer(B)
    for slot in range(4):
        a.train()
        alone(slot, a)
    b.train()
    before, outer = b.model, b.outer
    assert b.updates.take_over(*a.updates.dump(), is_new=False) == 0, "it gives nothing up"
    assert a.updates.journal.entries == b.updates.journal.entries
    assert all(map(torch.equal, a.updates.state.dump()[1], b.updates.state.dump()[1]))
    assert (b.updates.contribution.effort.steps, b.updates.contribution.age) == (2, 4)
    torch.testing.assert_close(b.model, before + b.outer - outer)


def test_later_news_does_not_hide_newer_versions():
    """Two groups of one round may be told of different versions."""
    a, b, c = Peer(A), Peer(A), Peer(B)
    for peer in (a, b, c):
        peer.train()
    make_round(0, a, b)
    earlier = b.updates.journal.since(0)
    a.train()
    alone(1, a)
    c.updates.begin(2)
    of_a, of_b, of_c = (peer.updates.statement(2) for peer in (a, b, c))
    assert c.updates.judge([of_a, of_c], 1, b"first") is False
    assert c.updates.judge([of_b, of_c], 1, b"second") is False
    assert list(land([c], [0.0], c.vector)) == [None]
    assert c.updates.heard_of == a.updates.journal.newest
    assert c.updates.make_up(earlier) == 1
    assert c.updates.lacks_updates


def test_news_of_an_earlier_group_is_kept():
    """It has failed, and the next group lacks an update: another one in its place would be a second one."""
    a, b, c = Peer(A), Peer(B), Peer(B)
    for peer in (a, b, c):
        peer.train()
    alone(0, a)
    for peer in (b, c):
        peer.updates.begin(1)
    of_a, of_b, of_c = (peer.updates.statement(2) for peer in (a, b, c))
    assert b.updates.judge([of_a, of_b], 1, b"first") is False
    assert b.updates.judge([of_b, of_c], 0, b"second") is False
    b.updates.make_up(a.updates.journal.since(0))  # it trains on meanwhile
    assert b.updates.judge([of_b, of_c], 0, b"third") is False, "its statement is older than that"
    b.updates.give_up()
    assert b.updates.journal.entries == a.updates.journal.entries


def test_impossible_sample_counts_do_no_harm():
    a, b, c = Peer(A), Peer(B), Peer(B)
    a.train(1)
    b.train(1, samples=MOST)
    make_round(0, a, b)
    metadata, tensors, *_ = answer({0: a.updates.journal.since(0)})
    found = parse_answer(MSGPackSerializer.loads(MSGPackSerializer.dumps(metadata)), tensors, 1)
    assert c.updates.make_up(found[0]) == 1
    assert c.updates.journal.entries == a.updates.journal.entries


def test_repeating_a_slot_alone_is_another_update():
    """As after an older checkpoint: others may have what was made of it the first time."""
    a, b = Peer(A), Peer(A)
    metadata, tensors = a.updates.dump()
    tensors = [tensor.clone() for tensor in tensors]
    a.train()
    alone(0, a)
    first = a.updates.journal.newest, a.outer
    a.updates.restore(metadata, tensors)
    a.updates.contribution.forget()
    with torch.no_grad():
        a.parameter.copy_(b.parameter)
    a.target = B
    a.train()
    alone(0, a)
    assert not torch.equal(a.outer, first[1])
    assert a.updates.journal.newest.hash != first[0].hash


def test_a_missing_update_stays_missing_until_made():
    """Also if the round that has told it fails, and the first answer is that nobody has it."""
    a, b = Peer(A), Peer(B)
    for peer in (a, b):
        peer.train()
    alone(0, a)
    begin(1, (a, b))
    b.updates.give_up()
    assert b.updates.make_up() == 0
    assert b.updates.lacks_updates
    assert b.updates.make_up(a.updates.journal.since(0)) == 1
    assert not b.updates.lacks_updates


def test_no_update_is_made_during_a_round():
    a, b = Peer(A), Peer(B)
    a.train()
    b.train()
    make_round(0, a)
    begin(1, (b,))
    assert b.updates.make_up(a.updates.journal.since(0)) == 0
    assert b.updates.may_lack_updates, "it asks again"
    assert b.updates.state.version == 0


def test_a_search_gives_way_to_updates_of_others():
    """Where rounds overlap there is always one under way, and who does not get into a group would never catch up."""
    a, b, c = Peer(A), Peer(B), Peer(B)
    for peer in (a, b, c):
        peer.train()
    make_round(0, a, c)
    begin(1, (b,))
    control = b.updates.flight.control = StepControl(0.0)
    others = a.updates.journal.since(0)
    assert b.updates.make_up([others[0]._replace(after=bytes(16))]) == 0
    assert not control.cancelled(), "that is of another lineage"
    control.began_allreduce = True
    assert b.updates.make_up(others) == 0
    control.began_allreduce = False
    assert b.updates.make_up(others) == 1
    assert control.cancelled()
    assert b.updates.flight is None
    assert not b.updates.may_lack_updates
    assert b.updates.contribution.effort.steps > 0, "what it has done counts next time"
    assert torch.equal(b.outer, a.outer)


def test_a_member_behind_does_not_count():
    a, b, c = Peer(A), Peer(B), Peer(B)
    for peer in (a, b, c):
        peer.train()
    make_round(0, a, b)
    for peer in (a, b, c):
        peer.train()
    weights, mean = begin(1, (a, b, c))
    assert weights == [1.0, 1.0, 0.0]
    landed = [*land((a, b, c), weights, mean)]
    assert landed[2] is None
    assert c.updates.standing is Relation.BEHIND
    assert torch.equal(c.outer, torch.zeros(2))
    assert c.updates.contribution.effort == Effort(4, 4)
    c.updates.take_over(*a.updates.dump(), is_new=False)
    assert c.updates.standing is Relation.WITH
    assert c.updates.contribution.age == 2
    assert torch.equal(c.outer, a.outer)


def test_a_peer_adopts_the_model_of_most():
    a, b, c = Peer(A), Peer(B), Peer(B, (5.0, 5.0))
    alone(0, c)
    weights, mean = begin(0, (a, b, c))
    assert [*land((a, b, c), weights, mean)][2] is None
    assert c.updates.standing is Relation.ELSEWHERE
    c.train()
    assert c.updates.take_over(*a.updates.dump(), is_new=False) == 1
    assert torch.equal(c.model, a.outer)
    assert c.updates.contribution.effort == Effort()


def test_an_older_state_is_not_taken_over():
    a, b = Peer(A), Peer(B)
    old = a.updates.dump()
    old = old[0], [tensor.clone() for tensor in old[1]]
    a.train()
    b.train()
    make_round(0, a, b)
    before = b.outer
    assert b.updates.take_over(*old, is_new=False) == 0
    assert torch.equal(b.outer, before)


def test_too_old_a_contribution_does_not_count():
    a = Peer(A)
    a.train()
    a.updates.contribution.age = 5
    assert a.updates.begin(0).weight == 0.0


def test_work_after_a_pause_is_not_old(caplog):
    """A peer without steps in some slots follows the others, and has nothing that could become old."""
    a, b = Peer(A), Peer(B)
    for slot in range(6):
        a.train()
        make_round(slot, a, b)
        assert torch.equal(a.model, b.model)
    a.train()
    b.train()
    (of_a, of_b), _ = make_round(6, a, b)
    assert (of_a.staleness, of_b.staleness) == (0, 0)
    assert of_b.contributed
    assert "are lost" not in caplog.text


def test_a_newcomer_counts_after_half_a_slot():
    a = Peer(A)
    a.train(2)
    assert a.updates.begin(0, least_steps=3).weight == 0.0
    a.updates.give_up()
    a.train(1)
    assert a.updates.begin(0, least_steps=3).weight == 1.0


def test_values_that_are_not_finite_do_not_count():
    a = Peer(A)
    a.train()
    with torch.no_grad():
        a.parameter[0] = float("inf")
    flight = a.updates.begin(0)
    assert not flight.message.is_finite
    assert flight.weight == 0.0
    a.updates.give_up()
    a.updates.reset_model()
    assert torch.equal(a.model, torch.zeros(2))


def test_rebase_keeps_the_work_done_meanwhile():
    a = Peer(A, mixing="rebase", factory=functools.partial(torch.optim.SGD, lr=1.0), delay=3)
    a.train(2)
    reference = torch.zeros(2)
    train(reference, A, 5)
    a.updates.begin(0)
    a.train(3)
    assert a.updates.flight.left == 0
    a.updates.land(None)
    torch.testing.assert_close(a.model, reference)
    assert a.updates.contribution.effort == Effort(3, 3)


# --- what messages leave out ------------------------------------------------------------------------------------------

SPARSE = TopKCompression(density=0.5)


def encoded(codec, vector):
    """The message that others get of a vector."""
    return codec.compress(vector, CompressionInfo.from_tensor(vector))


def begin_sparse(slot, peers):
    """All begin a round; returns their weights, and the mean of what they send in one of two values."""
    weights, _ = begin(slot, peers)
    messages = [encoded(SPARSE, peer.vector) for peer in peers]
    return weights, mean_of_messages(SPARSE, messages, weights, sparse_mean="members")


def roughly(values, expected):
    """Levels are rounded to float16."""
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float32), rtol=1e-3, atol=1e-3)


def test_without_a_delay_rebase_replaces_the_model_too():
    pairs = [[Peer(target, mixing=mixing) for target in (A, B)] for mixing in (0.0, "rebase")]
    for slot in range(3):
        for pair in pairs:
            for peer in pair:
                peer.train()
            make_round(slot, *pair)
        for one, other in zip(*pairs, strict=True):
            assert torch.equal(one.model, other.model)
            assert torch.equal(one.outer, other.outer)


def test_an_old_message_with_feedback_loses_nothing():
    """What others have got of all messages, and what is left, is what the peer has moved."""
    plain = functools.partial(torch.optim.SGD, lr=1.0)
    a, b = (Peer(target, factory=plain, codec=Blockwise4BitQuantization()) for target in (A, B))
    for peer in (a, b):
        peer.train()
    make_round(0, a, b)
    a.train()
    alone(1, a)
    b.train()
    b.updates.make_up(a.updates.journal.since(1))
    assert b.updates.contribution.age == 1
    wanted = b.outer - b.model + b.updates.contribution.error
    weights, mean = begin(2, (a, b))
    message = encoded(Blockwise4BitQuantization(), b.vector.clone())
    assert all(land((a, b), weights, mean))
    sent = Blockwise4BitQuantization().extract(message) / usual_staleness(1)
    torch.testing.assert_close(sent + b.updates.contribution.error, wanted)


def test_what_a_message_omits_follows_later():
    plain = functools.partial(torch.optim.SGD, lr=1.0)
    a, b = (Peer(target, factory=plain, codec=SPARSE) for target in (A, B))
    known = [
        ((0, 0), (0, 1.5), (1.5, 0)),
        ((0, 0), (-1.125, 0), (1.3125, -1.4625)),
        ((0.234375, 0), (0, 0.403125), (2.47969, -0.914062)),
    ]
    for slot, (left_a, left_b, outer) in enumerate(known):
        a.train()
        b.train()
        weights, mean = begin_sparse(slot, (a, b))
        assert all(land((a, b), weights, mean))
        roughly(a.outer, outer)
        assert torch.equal(a.outer, b.outer)
        roughly(a.updates.contribution.error, left_a)
        roughly(b.updates.contribution.error, left_b)


@pytest.mark.parametrize("how", ["failed", "late", "broken"])
def test_what_has_not_counted_leaves_nothing_out(how):
    a, b = (Peer(target, codec=Blockwise4BitQuantization()) for target in (A, B))
    for slot in range(2):
        a.train()
        b.train()
        if slot == 0:
            make_round(slot, a, b)
            before = b.updates.contribution.error.clone()
        elif how == "failed":
            begin(slot, (a, b))
            b.updates.give_up()
        else:
            late, share = ((b,), 1.0) if how == "late" else ((), 0.5)
            make_round(slot, a, b, late=late, share=share)
    assert torch.equal(b.updates.contribution.error, before)


def test_a_lone_message_leaves_nothing_out():
    a, b = (Peer(target, codec=SPARSE) for target in (A, B))
    a.train()
    b.train()
    weights, mean = begin_sparse(0, (a, b))
    list(land((a, b), weights, mean))
    left, outer = b.updates.contribution.error.clone() * 0.95, b.outer
    assert left.any()
    b.train()
    difference = outer - b.model
    b.updates.begin(1)
    torch.testing.assert_close(b.vector, difference + left)
    b.updates.land(None)
    assert b.updates.contribution.error is None


def test_starting_over_forgets_the_error():
    a, b = (Peer(target, codec=SPARSE) for target in (A, B))
    a.train()
    b.train()
    weights, mean = begin_sparse(0, (a, b))
    list(land((a, b), weights, mean))
    b.updates.reset_model()
    assert b.updates.contribution.error is None


# --- the same updates, but other bits ---------------------------------------------------------------------------------


def test_a_peer_adopts_the_bits_of_most(caplog):
    a, b, c = Peer(A), Peer(B), Peer(B)
    for slot in range(3):
        if slot == 2:
            with torch.no_grad():
                c.updates.state.parameter[0] += 1e-6
        for peer in (a, b, c):
            peer.train()
        weights, mean = begin(slot, (a, b, c))
        list(land((a, b, c), weights, mean))
    assert weights == [1.0, 1.0, 0.0]
    assert c.updates.standing is Relation.ELSEWHERE
    assert "is not that of most others" in caplog.text
    assert c.updates.state.version == 2
    assert c.updates.contribution.effort == Effort(2, 2)
    c.train()
    moved = c.model - c.outer
    assert c.updates.take_over(*a.updates.dump(), is_new=False) == 0
    assert torch.equal(c.outer, a.outer)
    torch.testing.assert_close(c.model - c.outer, moved)
    assert c.updates.contribution.effort == Effort(4, 4)
    assert c.updates.standing is Relation.WITH


def test_bits_are_compared_every_few_updates():
    a, b = Peer(A), Peer(B)
    told = []
    for slot in range(5):
        a.train()
        b.train()
        told.append(bool(a.updates.statement(2).digest))
        make_round(slot, a, b)
    assert told == [False, False, True, False, True]
    lone = Peer(A, average="parameters")
    for round_id in (b"1", b"2"):
        lone.updates.journal.append(lone.updates.journal.newest.followed_by(round_id, 1))
    assert not lone.updates.statement(2).digest
