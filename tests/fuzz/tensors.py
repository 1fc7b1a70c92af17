"""Targets that turn bytes into tensors, or take apart tensors by what somebody says of them."""

from __future__ import annotations

import torch

from shoal.archive.contents import order_of, put_together, take_apart
from shoal.averaging.message_means import PartMessages, as_bytes, unpack
from shoal.averaging.state.download import State
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import (
    BlockwiseQuantization,
    CompressionInfo,
    CompressionType,
    SerializedTensor,
    TopKCompression,
    deserialize_torch_tensor,
    serialize_torch_tensor,
)
from shoal.compression.one_result import Relayed
from shoal.compression.serialization import is_sparse
from tests.archive.states import small_state
from tests.fuzz.fuzzing import Target, check_text
from tests.fuzz.mutation import Mutator

VALUES = 5000
"""A full block of every codec, and one that is not full."""
_TENSORS = [torch.linspace(-1, 3, VALUES), torch.zeros(VALUES).index_fill_(0, torch.tensor([7, 4095, 4990]), 0.5)]


def _feed(hostile: SerializedTensor) -> str:
    try:
        tensor = deserialize_torch_tensor(hostile)
    except RuntimeError as e:
        check_text(e)
        return "refused"
    assert tensor.shape == (VALUES,)
    assert tensor.isfinite().all() or not is_sparse(hostile.metadata.compression)
    return "read"


def _target(name: str, codes: list[CompressionType]) -> Target:
    seeds = [serialize_torch_tensor(tensor, code) for code in codes for tensor in _TENSORS]
    material = [bytes(seed.buffer) for seed in seeds]

    def hostile(mutator: Mutator) -> SerializedTensor:
        seed = mutator.one_of(seeds)
        return SerializedTensor(seed.metadata, mutator.bytes(bytes(seed.buffer), material))

    return Target(name, hostile, _feed)


RELAYED = Relayed(TopKCompression(), BlockwiseQuantization())


def _relayed() -> Target:
    """Messages of members that a reducer has passed on."""
    info = CompressionInfo.from_tensor(_TENSORS[0])
    messages = [as_bytes(RELAYED.compress(tensor, info)) for tensor in (*_TENSORS, _TENSORS[0])]
    collected = PartMessages.of(RELAYED, info, range(3), [1.0, 2.0, 0.5], messages)
    packed, own = [collected.pack(receiver) for receiver in (0, 2, 9)], bytes(collected.buffers[0])
    material = [bytes(each.buffer) for each in packed]

    def hostile(mutator: Mutator) -> SerializedTensor:
        return SerializedTensor(packed[0].metadata, mutator.bytes(mutator.one_of(material), material))

    def feed(payload: SerializedTensor) -> str:
        try:
            mean = unpack(RELAYED, payload, lambda: own)
        except (ValueError, RuntimeError) as e:
            check_text(e)
            return "refused"
        assert mean is None or mean.shape == (VALUES,)
        return "read"

    return Target("messages passed on", hostile, feed)


_OF_DILOCO = {
    "slot": 7,
    "names": ["weight", "bias"],
    "fragments": [
        {"layout": [[0, 0, [3, 2]]], "tensors": 2, "optimizer": {"names": ["/0/momentum_buffer"]}},
        {"layout": [[1, 2, [3]]], "tensors": 1, "optimizer": {"names": []}},
    ],
    "inner": [{"names": ["/0/exp_avg", "/1/exp_avg"]}],
}
_STATES = {
    "Optimizer": small_state(3),
    "DiLoCo": State(_OF_DILOCO, [torch.ones(6), torch.ones(6), torch.ones(5), torch.ones(3, 2), torch.ones(3)]),
}


def _state(kind: str) -> Target:
    """The state that a donor gives to who keeps archives."""
    state = _STATES[kind]
    packed = MSGPackSerializer.dumps(state.metadata)

    def feed(data: bytes) -> str:
        try:
            given = State(MSGPackSerializer.loads(data), state.tensors)
            pieces = take_apart(kind, given)
        except ValueError as e:
            check_text(e)
            return "refused"
        kept = {piece.name: piece.tensor for each in pieces for piece in each}
        assert all(map(torch.equal, put_together(order_of(pieces), kept), state.tensors))
        return "kept"

    assert feed(packed) == "kept"
    return Target(f"archived state, {kind}", lambda mutator: mutator.packed(packed), feed)


def targets() -> list[Target]:
    return [
        *map(_state, _STATES),
        _relayed(),
        _target("tensor, largest values", [code for code in CompressionType if is_sparse(code)]),
        _target("tensor, all values", [code for code in CompressionType if not is_sparse(code)]),
    ]
