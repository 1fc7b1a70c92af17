"""Rounds in which reducers pass messages on instead of their mean: what that costs, and who gets which bits."""

from __future__ import annotations

import asyncio
import struct

import pytest
import torch

from shoal.averaging import RoundResult
from shoal.averaging.aggregation import TrimmedMean
from shoal.averaging.message_means import YOURS, PartMessages, as_bytes, checked, mean_of_messages, unpack
from shoal.averaging.round.parts import MOST_RELAYED_VALUES, split_into_parts
from shoal.compression import (
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionBase,
    SerializedTensor,
    TopKCompression,
)
from shoal.compression.one_result import OneResult, Relayed
from tests.averaging.swarm import Swarm, average_while_one_dies, average_while_one_is_late, make_control
from tests.averaging.test_rounds import Fault
from tests.compression.codecs import info_of
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = pytest.mark.once

BACK = BlockwiseQuantization()
FOUR_BITS = Relayed(Blockwise4BitQuantization(), BACK)
TOP_K = Relayed(TopKCompression(), BACK)
OF_MEMBERS = Relayed(TopKCompression(bits=8), BACK, "members")
ALL = [FOUR_BITS, TOP_K, OF_MEMBERS]
SIZE = 30_000
WEIGHTS = (1.0, 2.0, 5.0, 0.0)

every_codec = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.fingerprint)


def vector(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


async def start(codec: CompressionBase, number: int = 4, **changes) -> tuple[Swarm, list[torch.Tensor]]:
    swarm, tensors = Swarm(), [vector(seed) for seed in range(number)]
    for tensor in tensors:
        await swarm.add([tensor], compression=codec, **changes)
    return swarm, tensors


async def run(swarm: Swarm, **changes):
    number = len(swarm.nodes)
    controls = [
        make_control(node, expected_group_size=number, weight=weight, **changes)
        for node, weight in zip(swarm.nodes, WEIGHTS, strict=False)
    ]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    return controls


def exact_mean(codec: Relayed, swarm: Swarm, result: RoundResult, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sums are rounded, so the order of the members counts."""
    order = [[node.p2p.peer_id for node in swarm.nodes].index(peer) for peer in result.peers]
    messages = [codec.compress(tensors[member], info_of(tensors[member])) for member in order]
    mean = mean_of_messages(codec.out, messages, result.weights, sparse_mean=codec.sparse_mean)
    assert mean is not None
    return mean


@every_codec
@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("part_size_bytes", [50, 2**19], ids=["many parts", "large parts"])
@alone_in_virtual_time
async def test_all_members_have_the_bits_that_can_be_known_before(codec, number, part_size_bytes):
    """They depend on the messages alone, not on who reduces them, nor on how the vector is cut."""
    swarm, tensors = await start(codec, number, part_size_bytes=part_size_bytes)
    before = [tensor.clone() for tensor in tensors]
    controls = await run(swarm)
    assert all(control.round.share_averaged == 1 for control in controls)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    mean = exact_mean(codec, swarm, controls[0].round, before)
    if codec is FOUR_BITS and number > 2:
        mean = BACK.compress_and_decode(mean, info_of(mean))[1]
    assert torch.equal(tensors[0], mean)
    await swarm.close()


@every_codec
@pytest.mark.parametrize("kind", ["kill sending", "kill reducing"])
@alone_in_virtual_time
async def test_survivors_have_the_same_bits(monkeypatch, codec, kind):
    swarm, tensors = await start(codec, part_size_bytes=100, sender_timeout=0.5, reducer_timeout=1.0)
    Fault(monkeypatch, swarm, kind, (0,))
    controls = await average_while_one_dies(swarm)
    assert all(controls[i].round.share_averaged == 1 for i in (1, 2, 3))
    assert all(torch.equal(tensors[i], tensors[1]) for i in (2, 3))
    await swarm.close()


@every_codec
@alone_in_virtual_time
async def test_late_member_gets_the_same_bits(codec):
    swarm, tensors = await start(codec, quorum=3, quorum_grace=0.1)
    controls = await average_while_one_is_late(swarm)
    assert controls[0].round.late
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    await swarm.close()


@alone_in_virtual_time
async def test_values_that_are_not_finite_are_left_out():
    swarm, tensors = await start(TOP_K, 3)
    tensors[0][7] = float("nan")
    before = [tensor.clone() for tensor in tensors]
    controls = await run(swarm)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    assert sorted(controls[0].round.weights) == [0.0, 2.0, 5.0]
    assert torch.equal(tensors[0], exact_mean(TOP_K, swarm, controls[0].round, before))
    await swarm.close()


@alone_in_virtual_time
async def test_without_any_weight_everybody_keeps_its_values():
    swarm, tensors = await start(TOP_K, 2)
    before = [tensor.clone() for tensor in tensors]
    controls = [make_control(node, expected_group_size=2, weight=0.0) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    assert all(map(torch.equal, tensors, before))
    await swarm.close()


@pytest.mark.parametrize(
    ("codec", "number", "bits_per_value"),
    [
        # Each member's message reaches each other member once, by way of the reducer.
        (TOP_K, 4, 3 * (2 + 4 + 64 * 1.75) * 8 / 4096),
        (FOUR_BITS, 2, 1 * 4.25),
        # As everywhere, and as good as the codec for averages.
        (FOUR_BITS, 4, 2 * 3 / 4 * (4.25 + 8 + 32 / 4096) / 2),
    ],
    ids=["top-k", "4 bits in a pair", "4 bits"],
)
@alone_in_virtual_time
async def test_what_members_send(codec, number, bits_per_value):
    swarm, tensors = Swarm(), [vector(seed, 100 * 4096) for seed in range(number)]
    for tensor in tensors:
        await swarm.add([tensor], compression=codec)
    controls = [make_control(node, expected_group_size=number) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    sent, received = (sum(getattr(c.round, f"bytes_{what}") for c in controls) for what in ("sent", "received"))
    assert sent == received
    expected = number * bits_per_value / 8 * tensors[0].numel()
    assert expected <= sent <= 1.01 * expected
    beside = sum(node.p2p.metrics.bytes_sent for node in swarm.nodes) - sent
    assert beside <= 0.03 * sent + number * 20_000
    await swarm.close()


@pytest.mark.parametrize("codec", [*ALL, OneResult(BACK)], ids=lambda codec: codec.fingerprint)
@pytest.mark.parametrize("shares", [(30_000,), (9_999, 20_001), (5_000_000, 0, 4_000_000, 123)], ids=str)
def test_parts_are_cut_where_blocks_end(codec, shares):
    parts = split_into_parts([info_of(torch.empty(sum(shares)), key=0)], codec, 2**19, shares)
    starts = [part.segments[0].start for part in parts]
    assert all(start % codec.block == 0 for start in starts)
    assert sum(part.length for part in parts) == sum(shares)
    assert max(part.length for part in parts) <= MOST_RELAYED_VALUES


def test_rules_that_need_values_are_refused():
    swarm = Swarm()
    with pytest.raises(ValueError, match=r"aggregation=.* needs the values of members"):
        asyncio.run(swarm.add([vector(0)], compression=TOP_K, aggregation=TrimmedMean(0.1)))


# --- the payload ------------------------------------------------------------------------------------------------------


def collected(codec: Relayed = TOP_K, weights=(1.0, 2.0, 3.0), size: int = 5000) -> PartMessages:
    tensors = [vector(seed, size) for seed in range(len(weights))]
    messages = [as_bytes(codec.compress(tensor, info_of(tensor))) for tensor in tensors]
    return PartMessages.of(codec, info_of(tensors[0]), range(len(weights)), weights, messages)


@every_codec
@pytest.mark.parametrize("receiver", range(4))
def test_everybody_reads_the_mean_from_the_others_messages_and_its_own(codec, receiver):
    messages = collected(codec, WEIGHTS)
    packed = messages.pack(receiver)
    own = bytes(messages.buffers[receiver]) if receiver < 3 else b"unused"
    found, mean = unpack(codec, packed, lambda: own), messages.mean()
    assert found is not None
    assert mean is not None
    assert torch.equal(found, mean)
    sent = sum(len(buffer) for number, buffer in enumerate(messages.buffers) if number != receiver)
    assert len(packed.buffer) == 2 + 3 * 12 + sent


def test_when_messages_are_passed_on():
    for codec, most in ((FOUR_BITS, 2), (TOP_K, 35)):
        for members in (most, most + 1):
            messages = collected(codec, (1.0,) * members, 8192)
            assert messages.pay(info_of(vector(0, 8192))) == (members == most)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "without their number"),
        (lambda data: data[:5], "5 bytes for 3 messages"),
        (lambda data: data[:-1], "take"),
        (lambda data: data + b"x", "take"),
        (lambda data: data[:2] + struct.pack("<d", -1.0) + data[10:], "with weight -1"),
        (lambda data: data[:2] + struct.pack("<d", float("nan")) + data[10:], "with weight nan"),
        (lambda data: data[:10] + struct.pack("<I", YOURS) + data[14:], "twice"),
        (lambda data: data[:38] + b"\xff\xff" + data[40:], "the serialized tensor takes"),
    ],
    ids=["empty", "no list", "too short", "too long", "negative", "nan", "twice", "bad message"],
)
def test_payloads_that_make_no_sense(change, message):
    packed = collected().pack(1)
    own = bytes(collected().buffers[1])
    bad = SerializedTensor(packed.metadata, change(bytes(packed.buffer)))
    with pytest.raises((ValueError, RuntimeError), match=message):
        unpack(TOP_K, bad, lambda: own)


def test_a_message_is_read_before_it_is_passed_on():
    good = FOUR_BITS.compress(vector(0, 64), info_of(vector(0, 64)))
    assert bytes(checked(FOUR_BITS, good).numpy()) == bytes(good.buffer)
    with pytest.raises(RuntimeError, match="takes"):
        checked(FOUR_BITS, SerializedTensor(good.metadata, bytes(good.buffer)[:-1]))
    spoilt = bytes(Blockwise4BitQuantization().compress(vector(0, 64), info_of(vector(0, 64))).buffer)
    scale = torch.tensor([float("inf")], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="not finite"):
        checked(FOUR_BITS, SerializedTensor(good.metadata, scale + spoilt[2:]))
