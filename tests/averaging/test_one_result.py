"""Rounds whose members all end with the same bits, although the codec loses some, whatever happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.compression import (
    BFloat16Compression,
    Blockwise4BitQuantization,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    NoCompression,
)
from shoal.compression.one_result import OneResult
from tests.averaging.swarm import Swarm, average_while_one_dies, average_while_one_is_late, make_control
from tests.averaging.test_rounds import Fault
from tests.compression.codecs import name_of, restored
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = pytest.mark.once

SIZE = 30_000
CODECS: list[CompressionBase] = [
    NoCompression(),
    Float16Compression(),
    BFloat16Compression(),
    BlockwiseQuantization(),
]
FOUR_BITS = OneResult(Blockwise4BitQuantization(), BlockwiseQuantization())
ALL = [*map(OneResult, CODECS), FOUR_BITS]


def name(codec: OneResult) -> str:
    return codec.fingerprint


async def start(codec, number=4, **changes):
    swarm = Swarm()
    tensors = [torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) for i in range(number)]
    for tensor in tensors:
        # Parts end where blocks do.
        await swarm.add(
            [tensor], compression=codec, part_size_bytes=4096 if codec is not FOUR_BITS else 2176, **changes
        )
    return swarm, tensors


@pytest.mark.parametrize("codec", ALL, ids=name)
@alone_in_virtual_time
async def test_all_members_have_the_same_bits(codec):
    swarm, tensors = await start(codec)
    before = [tensor.clone() for tensor in tensors]
    controls = [make_control(node, expected_group_size=4) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    assert all(control.round.share_averaged == 1 for control in controls)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    mean = sum(tensor.double() for tensor in before) / 4
    error = (tensors[0].double() - mean).square().mean().sqrt()
    assert error < 0.15
    await swarm.close()


@pytest.mark.parametrize("codec", [Float16Compression(), BFloat16Compression()], ids=name_of)
@alone_in_virtual_time
async def test_own_values_count_as_if_they_had_been_sent(codec):
    """So the result is known from the values alone: it does not depend on who reduces which part."""
    swarm, tensors = await start(OneResult(codec), number=3)
    sent = [restored(codec, tensor) for tensor in tensors]
    weights = (1, 2, 5)
    controls = [
        make_control(node, expected_group_size=3, weight=w) for node, w in zip(swarm.nodes, weights, strict=True)
    ]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    mean = sum(weight / 8 * values.double() for weight, values in zip(weights, sent, strict=True))
    torch.testing.assert_close(tensors[0].double(), mean, rtol=2 * torch.finfo(codec_type(codec)).eps, atol=1e-6)
    assert torch.equal(restored(codec, tensors[0]), tensors[0])
    await swarm.close()


def codec_type(codec: CompressionBase) -> torch.dtype:
    return torch.bfloat16 if isinstance(codec, BFloat16Compression) else torch.float16


@pytest.mark.parametrize("codec", ALL, ids=name)
@pytest.mark.parametrize("kind", ["kill sending", "kill reducing"])
@alone_in_virtual_time
async def test_survivors_have_the_same_bits(monkeypatch, codec, kind):
    swarm, tensors = await start(codec, sender_timeout=0.5, reducer_timeout=1.0)
    Fault(monkeypatch, swarm, kind, (0,))
    controls = await average_while_one_dies(swarm)
    assert all(controls[i].round.share_averaged == 1 for i in (1, 2, 3))
    assert all(torch.equal(tensors[i], tensors[1]) for i in (2, 3))
    await swarm.close()


@pytest.mark.parametrize("codec", ALL, ids=name)
@alone_in_virtual_time
async def test_late_member_gets_the_same_bits(codec):
    swarm, tensors = await start(codec, quorum=3, quorum_grace=0.1)
    controls = await average_while_one_is_late(swarm)
    assert controls[0].round.late
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    await swarm.close()


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_decoded_values_are_decoded_to_the_same_ones_again(codec):
    """A member that passes an average on encodes what it has decoded."""
    for seed in range(20):
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10)
        decoded = restored(codec, values)
        assert torch.equal(restored(codec, decoded), decoded)


def test_peers_with_other_codecs_form_no_groups():
    prints = {codec.fingerprint for codec in (*ALL, *CODECS)}
    assert len(prints) == len(ALL) + len(CODECS)
    assert not OneResult(NoCompression()).lossy
    assert FOUR_BITS.lossy
    assert [codec.block for codec in ALL] == [1, 1, 1, 4096, 4096]
