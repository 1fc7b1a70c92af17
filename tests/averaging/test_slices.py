"""Parts that travel as a whole or in slices."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest
import torch

from shoal.averaging.protocol import PartMessage, PartStatus
from shoal.averaging.slices import SLICE_BYTES, Encoded, Incoming, Outgoing, send_all
from shoal.averaging.vector import RoundVector
from shoal.compression import CompressionInfo, NoCompression, Uniform8BitQuantization
from shoal.errors import ProtocolError

LENGTHS = {
    "less than a slice": 10,
    "exactly one": SLICE_BYTES // 4,
    "several": SLICE_BYTES,
    "and a bit": SLICE_BYTES + 1,
}


@dataclasses.dataclass
class Wire:
    """Keeps what is sent, and gives it to who reads."""

    sent: list[tuple[PartMessage, bytes]] = dataclasses.field(default_factory=list)
    payload: bytes = b""

    async def send(self, message, *payload):
        await asyncio.sleep(0)  # others may take the next piece
        self.sent.append((message, b"".join(map(bytes, payload))))

    @property
    def payload_size(self):
        return len(self.payload)

    async def read_payload_into(self, buffer):
        await asyncio.sleep(0)
        buffer[:] = self.payload


def vector_of(tensor, codec):
    info = CompressionInfo.from_tensor(tensor, key=0)
    return RoundVector([tensor], [info], codec, tensor.numel() * 2, [tensor.numel()], 1.0)


def outgoing_of(vector, on_sent=lambda: None, *, there=None, is_average=False, is_urgent=lambda index: False):
    """The parts of a vector; ``there`` has an event for each part that has to be waited for."""

    async def encode(index):
        return Encoded(PartStatus.VALUES, vector.encode(vector.parts[0][index]), is_average)

    def is_there(index):
        return there is None or there[index].is_set()

    async def wait(index):
        await there[index].wait()

    return Outgoing(len(vector.parts[0]), encode, is_there, wait, on_sent, is_urgent)


async def send(vector, wires, *, in_slices):
    sent = []
    outgoing = outgoing_of(vector, lambda: sent.append(sum(len(wire.sent) for wire in wires)))
    outgoing.in_slices = in_slices
    await asyncio.gather(*[send_all(wire, outgoing) for wire in wires])
    assert sent == [sum(len(wire.sent) for wire in wires)]  # once, and when nothing is under way any more


async def receive(incoming, message, payload):
    return await incoming.receive(Wire(payload=payload), message)


@pytest.mark.parametrize("codec", [NoCompression(), Uniform8BitQuantization()])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("connections", [1, 3])
async def test_parts_arrive_as_they_were(codec, length, connections):
    tensor = torch.randn(2 * length, generator=torch.Generator().manual_seed(0))
    vector, wires = vector_of(tensor, codec), [Wire() for _ in range(connections)]
    await send(vector, wires, in_slices=connections > 1)
    pieces = [piece for wire in wires for piece in wire.sent]
    assert all(len(payload) <= SLICE_BYTES for _, payload in pieces) or connections == 1
    incoming = Incoming(vector, vector.parts[0])
    found = {}
    for message, payload in reversed(pieces):
        is_complete, values = await receive(incoming, message, payload)
        if is_complete:
            found[message.index] = values
    assert not incoming.missing
    assert len(found) == len(vector.parts[0])
    for index, part in enumerate(vector.parts[0]):
        expected = codec.extract(vector.encode(part))
        assert torch.equal(found[index], expected)


async def test_connections_share_a_part():
    vector, wires = vector_of(torch.zeros(4 * SLICE_BYTES), NoCompression()), [Wire(), Wire()]
    await send(vector, wires, in_slices=True)
    for wire in wires:
        assert {message.index for message, _ in wire.sent} == set(range(len(vector.parts[0])))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"offset": -SLICE_BYTES},
        {"offset": 2**40},
        {"size": SLICE_BYTES},
        {"size": -1},
        {"size": 2**60},
        {"size": 0},
        {"index": 9},
        {"metadata": None},
    ],
)
async def test_slices_that_are_not_due_are_refused(change):
    vector, wire = vector_of(torch.zeros(SLICE_BYTES), NoCompression()), Wire()
    await send(vector, [wire], in_slices=True)
    incoming = Incoming(vector, vector.parts[0])
    (message, payload), (second, second_payload) = wire.sent[:2]
    assert await receive(incoming, message, payload) == (False, None)
    with pytest.raises(ProtocolError):
        await receive(incoming, msgspec.structs.replace(second, **change), second_payload)


async def test_a_slice_that_comes_twice_is_refused():
    vector, wire = vector_of(torch.zeros(SLICE_BYTES), NoCompression()), Wire()
    await send(vector, [wire], in_slices=True)
    incoming = Incoming(vector, vector.parts[0])
    await receive(incoming, *wire.sent[0])
    with pytest.raises(ProtocolError):
        await receive(incoming, *wire.sent[0])
    with pytest.raises(ProtocolError):  # nor may it be longer than its place
        await receive(incoming, wire.sent[1][0], wire.sent[1][1] + b"\0")


async def test_one_connection_carries_first_of_all_what_others_wait_for():
    vector = vector_of(torch.zeros(SLICE_BYTES), NoCompression())
    there, wire = [asyncio.Event(), asyncio.Event()], Wire()
    parts, averages = outgoing_of(vector), outgoing_of(vector, there=there, is_average=True)
    parts.in_slices = averages.in_slices = True
    there[0].set()
    sending = asyncio.ensure_future(send_all(wire, parts, averages))
    for _ in range(100):
        await asyncio.sleep(0)
    found = [(message.is_average, message.index) for message, _ in wire.sent]
    assert found == [(False, 0)] * 2 + [(False, 1)] * 2 + [(True, 0)] * 2  # the second average is not there
    assert not sending.done()
    assert (parts.left, averages.left) == (0, 1)
    there[1].set()
    await sending
    assert [message.index for message, _ in wire.sent if message.is_average] == [0, 0, 1, 1]


async def test_what_is_urgent_goes_first():
    vector = vector_of(torch.zeros(2 * SLICE_BYTES), NoCompression())
    wire = Wire()
    averages = outgoing_of(vector, is_average=True, is_urgent=lambda index: index == 0)
    await send_all(wire, outgoing_of(vector), averages)
    assert [message.is_average for message, _ in wire.sent] == [True, False, False, True]
