"""One member's share of an all-reduce."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch

from shoal.averaging import Aggregation, CenteredClip
from shoal.averaging.messages import PartStatus
from shoal.averaging.round.combining import HEAVY_VALUES, Combiner
from shoal.averaging.round.parts import Part, Segment
from shoal.averaging.round.reducer import OwnAverage, PartReducer, weighted_mean
from shoal.compression import (
    CompressionInfo,
    NoCompression,
    TensorRole,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)
from shoal.errors import AllreduceException, ProtocolError
from tests.device import on_cpu_only
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = on_cpu_only  # all values are in host memory here

EXACT = NoCompression()


def make_reducer(parts, senders, *, local=True, weight=1.0, codec=EXACT, role=TensorRole.UNSPECIFIED, rule=None):
    """Each tensor is a part."""
    infos = [CompressionInfo.from_tensor(part, key=0, part_size=part.numel(), role=role) for part in parts]
    described = [
        Part((Segment(index, 0, len(part)),), len(part), 0, codec, info)
        for index, (part, info) in enumerate(zip(parts, infos, strict=True))
    ]
    combiner = None if rule is None else Combiner(rule, sum(map(len, parts)), {}, pytest.fail)
    own_values = (lambda part: part.of(parts)) if local else None
    return PartReducer(described, senders, own_values, 0, {0: weight}, combiner=combiner)


@pytest.mark.parametrize("num_parts", [0, 1, 100])
@alone_in_virtual_time
async def test_mean_is_exact_for_any_interleaving(num_parts):
    rng = random.Random(num_parts)
    values = {i: [torch.randn(k + 1) for k in range(num_parts)] for i in range(4)}
    weights = {0: 1.0, 1: 0.0, 2: 2.5, 3: 7.0}
    reducer = make_reducer(values[0], [1, 2, 3], weight=weights[0])

    async def send(sender):
        reducer.begin(sender, weights[sender])
        for index in range(num_parts):
            await reducer.wait_for_room(index)
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            reducer.deliver(sender, index, values[sender][index])

    async def receive(sender):
        replies = [await reducer.reply(index, sender) for index in range(num_parts)]
        reducer.delivered_everything(sender)
        assert all(status is PartStatus.VALUES for _, status in replies)
        return [deserialize_torch_tensor(encoded) for encoded, _ in replies]

    async def own():
        return [(await reducer.average(index)).values for index in range(num_parts)]

    *_, a, b, c, d = await asyncio.gather(*[send(i) for i in (1, 2, 3)], *[receive(i) for i in (1, 2, 3)], own())
    await reducer.finished.wait()
    for index in range(num_parts):
        expected = sum(w * values[i][index].double() for i, w in weights.items()) / sum(weights.values())
        assert torch.allclose(d[index].double(), expected, atol=1e-6)
        assert torch.equal(a[index], b[index])
        assert torch.equal(a[index], c[index])
        assert torch.equal(a[index], d[index])


@alone_in_virtual_time
async def test_result_does_not_depend_on_who_is_faster():
    values = [torch.randn(1000) for _ in range(5)]
    results = []
    for order in ([1, 2, 3, 4], [4, 2, 1, 3]):
        reducer = make_reducer([values[0]], [1, 2, 3, 4])
        for sender in order:
            reducer.begin(sender, 1.0)
            reducer.deliver(sender, 0, values[sender])
        results.append((await reducer.average(0)).values)
    assert torch.equal(*results)


@alone_in_virtual_time
async def test_banned_sender_is_excluded_from_what_it_has_not_delivered():
    local, sent = [torch.zeros(3), torch.zeros(3)], torch.ones(3)
    reducer = make_reducer(local, [1, 2])
    reducer.begin(1, 1.0)
    reducer.begin(2, 1.0)
    reducer.deliver(1, 0, sent)
    reducer.deliver(2, 0, sent)
    reducer.deliver(2, 1, sent)
    reducer.ban(1, "gone")
    assert torch.allclose((await reducer.average(0)).values, torch.full((3,), 2 / 3))
    assert torch.allclose((await reducer.average(1)).values, torch.full((3,), 1 / 2))
    reducer.delivered_everything(2)
    assert reducer.finished.is_set()
    assert reducer.banned == {1: "gone"}


@alone_in_virtual_time
async def test_ban_while_an_early_part_waits_does_not_hang():
    reducer = make_reducer([torch.zeros(1), torch.zeros(1)], [1, 2])
    for sender in (1, 2):
        reducer.begin(sender, 1.0)
    reducer.deliver(1, 0, torch.ones(1))
    reducer.deliver(1, 1, torch.ones(1))
    reducer.ban(1, "gone")
    reducer.deliver(2, 0, torch.ones(1))
    reducer.deliver(2, 1, torch.ones(1))
    assert torch.allclose((await reducer.average(1)).values, torch.full((1,), 2 / 3))  # what it had delivered counts


@alone_in_virtual_time
async def test_all_weights_zero_means_no_average():
    reducer = make_reducer([torch.ones(2)], [1], weight=0.0)
    reducer.begin(1, 0.0)
    reducer.deliver(1, 0, torch.full((2,), 5.0))
    assert await reducer.reply(0, 1) == (None, PartStatus.UNCHANGED)
    assert await reducer.average(0) == OwnAverage(None, is_delta=False, is_shared=True)


@alone_in_virtual_time
async def test_sender_cannot_run_far_ahead(monkeypatch):
    monkeypatch.setattr("shoal.averaging.round.reducer.WINDOW_BYTES", 0)
    reducer = make_reducer([torch.zeros(1)] * 5, [1, 2])
    reducer.begin(1, 1.0)
    reducer.begin(2, 1.0)
    await reducer.wait_for_room(0)
    await reducer.wait_for_room(1)
    too_early = asyncio.ensure_future(reducer.wait_for_room(2))
    await asyncio.sleep(0)
    assert not too_early.done()
    reducer.deliver(1, 0, torch.zeros(1))
    reducer.deliver(2, 0, torch.zeros(1))
    await too_early


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32]
)
def test_mean_keeps_the_type_and_sums_wide(dtype):
    values = [torch.full((4,), 60_000 if dtype.itemsize > 2 or dtype is torch.bfloat16 else 60_000.0).to(dtype)] * 3
    mean = weighted_mean(values, [1.0, 2.0, 3.0])
    assert mean is not None
    assert mean.dtype == dtype
    assert torch.equal(mean, values[0])  # a sum in fp16 would be infinite


def test_mean_of_integers_is_rounded():
    mean = weighted_mean([torch.tensor([1, 2, -5]), torch.tensor([2, 2, -6])], [1.0, 1.0])
    assert mean is not None
    assert mean.tolist() == [2, 2, -6]


@alone_in_virtual_time
async def test_excluded_member_leaves_averages_that_others_still_need():
    reducer = make_reducer([torch.zeros(3)], [1, 2, 3], local=False)
    for sender in (1, 2):
        reducer.begin(sender, 1.0)
        reducer.deliver(sender, 0, torch.full((3,), float(sender)))
    reducer.ban(3, "late")
    with pytest.raises(ProtocolError, match="without this member"):
        await reducer.reply(0, 3)
    for sender in (1, 2):
        encoded, _ = await reducer.reply(0, sender)
        assert deserialize_torch_tensor(encoded).tolist() == [1.5] * 3


@pytest.mark.parametrize("is_similar", [True, False])
@pytest.mark.parametrize("role", [TensorRole.GRADIENT, TensorRole.PARAMETER])
@alone_in_virtual_time
async def test_own_values_count_as_the_others_do_if_they_are_much_the_same(role, is_similar):
    codec = Uniform8BitQuantization()
    own, noise = torch.randn(2, 1000).unbind()
    other = own + 0.1 * noise if is_similar else noise
    info = CompressionInfo.from_tensor(own)
    counted, sent = (codec.extract(codec.compress(values, info)) for values in (own, other))
    reducer = make_reducer([own], [1], codec=codec, role=role)
    reducer.begin(1, 1.0)
    reducer.deliver(1, 0, sent)
    average = await reducer.average(0)
    if role is TensorRole.GRADIENT or not is_similar:
        assert not average.is_delta
        torch.testing.assert_close(average.values, (own + sent) / 2)
    else:
        assert average.is_delta
        torch.testing.assert_close(average.values, (sent - counted) / 2)


@alone_in_virtual_time
async def test_whose_values_come_first_makes_no_difference():
    own, unlike = torch.randn(2, 1000).unbind()
    sent = {1: own + 0.01, 2: unlike}
    averages = []
    for order in ([1, 2], [2, 1]):
        reducer = make_reducer([own], [1, 2], codec=Uniform8BitQuantization())
        for sender in order:
            reducer.begin(sender, 1.0)
            reducer.deliver(sender, 0, sent[sender].clone())
        averages.append(await reducer.peek(0))
    assert torch.equal(*averages)


@pytest.mark.parametrize("size", [1e-320, 1.0, 1e38, 1e308])
def test_weights_of_any_size_have_the_same_bits_as_ordinary_ones(size):
    values = list(torch.randn(4, 1000).unbind())
    shares = [1.0, 0.5, 0.0, 0.25]
    mean = weighted_mean(values, [size * share for share in shares])
    assert mean is not None
    if size > 1e-300:  # tinier ones are rounded themselves
        assert torch.equal(mean, weighted_mean(values, shares))
    torch.testing.assert_close(mean, weighted_mean(values, shares), rtol=1e-2, atol=1e-2)


def test_what_has_no_weight_is_left_out():
    spoilt = torch.tensor([torch.nan, torch.inf])
    assert weighted_mean([spoilt, torch.ones(2), spoilt], [0.0, 3.0, 0.0]).tolist() == [1, 1]
    assert weighted_mean([spoilt], [0.0]) is None
    assert weighted_mean([], []) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("number", [3, 7, 10])
@alone_in_virtual_time
async def test_mean_of_the_largest_values_is_finite(dtype, number):
    """Shares as a third are rounded, and may add up to more than 1."""
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    reducer = make_reducer([largest.clone()], range(1, number))
    for sender in range(1, number):
        reducer.begin(sender, 1.0)
        reducer.deliver(sender, 0, largest.clone())
    average = (await reducer.average(0)).values
    torch.testing.assert_close(average, largest)


@alone_in_virtual_time
async def test_values_that_changed_after_they_were_checked_do_not_count():
    """Somebody writes into tensors that are being averaged: this peer's own part is left out, and it gets the mean."""
    own = torch.tensor([1.0, torch.nan])
    reducer = make_reducer([own], [1, 2])
    for sender in (1, 2):
        reducer.begin(sender, 1.0)
        reducer.deliver(sender, 0, torch.full((2,), float(sender)))
    average = await reducer.average(0)
    assert not average.is_delta
    assert average.values.tolist() == [1.5, 1.5]


class HeldUp(Aggregation):
    """Averages when it is told to, and says where."""

    def __init__(self, *, held_up=True):
        self.began, self.may_go_on, self.threads = threading.Event(), threading.Event(), []
        if not held_up:
            self.may_go_on.set()

    def combine(self, values, weights, share):
        self.threads.append(threading.current_thread())
        self.began.set()
        assert threading.current_thread() is not threading.main_thread() or self.may_go_on.is_set(), "hangs"
        self.may_go_on.wait()
        return values.mean(0)


LARGE = HEAVY_VALUES


async def deliver_all(reducer, senders, *, parts=1):
    for sender in senders:
        reducer.begin(sender, 1.0)
        for index in range(parts):
            reducer.deliver(sender, index, torch.full((LARGE,), float(sender)))


async def test_the_loop_goes_on_while_a_rule_is_at_work():
    rule = HeldUp()
    reducer = make_reducer([torch.zeros(LARGE)], [1, 2], rule=rule)
    await deliver_all(reducer, [1])
    reducer.ban(2, "late")
    await asyncio.get_running_loop().run_in_executor(None, rule.began.wait)
    finishing = asyncio.ensure_future(reducer.finish())
    reducer.deliver(2, 0, torch.full((LARGE,), 100.0))  # does not count any more
    reducer.ban(1, "gone")  # what it has delivered counts
    await asyncio.sleep(0)
    assert reducer.finished.is_set()
    assert not reducer.is_averaged(0)
    assert not finishing.done()
    rule.may_go_on.set()
    assert torch.equal((await reducer.average(0)).values, torch.full((LARGE,), 0.5))
    await finishing
    assert len(rule.threads) == 1
    with pytest.raises(ProtocolError, match="averaged without"):
        await reducer.reply(0, 2)


async def test_a_rule_works_on_one_part_after_another_and_gives_what_it_gives_in_the_loop():
    values = [torch.randn(LARGE) for _ in range(3)]
    rule = CenteredClip(1.0)
    reducer = make_reducer([values[0]] * 3, [1, 2], rule=rule)
    for sender in (1, 2):
        reducer.begin(sender, 1.0)
        for index in range(3):
            reducer.deliver(sender, index, values[sender])
    assert not reducer.is_averaged(0)
    expected = rule.aggregate(values, [1.0] * 3, [1.0] * 3, 1 / 3)
    for index in range(3):
        assert torch.equal((await reducer.average(index)).values, expected)


async def test_the_mean_and_small_parts_are_averaged_at_once():
    mean = make_reducer([torch.zeros(LARGE)], [1])
    await deliver_all(mean, [1])
    assert mean.is_averaged(0)
    rule = HeldUp(held_up=False)
    reducer = make_reducer([torch.zeros(100)], [1], rule=rule)
    reducer.begin(1, 1.0)
    reducer.deliver(1, 0, torch.ones(100))
    assert reducer.is_averaged(0)
    assert rule.threads == [threading.main_thread()]


async def test_a_rule_that_fails_beside_the_loop_is_the_fault_of_who_reduces():
    class Broken(Aggregation):
        def combine(self, values, weights, share):
            raise RuntimeError("no memory")

    reducer = make_reducer([torch.zeros(LARGE)] * 2, [1], rule=Broken())
    await deliver_all(reducer, [1], parts=2)
    with pytest.raises(AllreduceException, match="no memory"):
        await reducer.finish()
    with pytest.raises(AllreduceException, match="no memory"):
        await reducer.peek(1)


async def test_abandoned_round_does_not_wait_for_its_rule():
    rule = HeldUp()
    reducer = make_reducer([torch.zeros(LARGE)], [1], rule=rule)
    await deliver_all(reducer, [1])
    await asyncio.get_running_loop().run_in_executor(None, rule.began.wait)
    finishing = asyncio.ensure_future(reducer.finish())
    await asyncio.sleep(0)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    rule.may_go_on.set()
    assert not reducer.is_averaged(0)
