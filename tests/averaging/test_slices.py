"""Parts that travel as a whole or in slices."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest
import torch

from shoal.averaging.messages import PartHeader, PartMessage, PartStatus, describe_part
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.sending import BUNDLE_BYTES, SLICE_BYTES, OutgoingParts, send_all
from shoal.averaging.round.traffic import IncomingParts
from shoal.compression import CompressionInfo, CompressionType, NoCompression, Uniform8BitQuantization
from shoal.compression.base import TensorMetadata
from shoal.errors import ProtocolError
from shoal.net.transport import MAX_HEADER_BYTES, Kind, pack
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = pytest.mark.once

LENGTHS = {
    "less than a slice": 10,
    "exactly one": SLICE_BYTES // 4,
    "several": SLICE_BYTES,
    "and a bit": SLICE_BYTES + 1,
}


class TensorByTensor(NoCompression):
    """Each tensor has parts of its own, all of the same size."""


EXACT = TensorByTensor()
METADATA = TensorMetadata(int(CompressionType.NONE), "float32", (SLICE_BYTES // 2,))


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
        if len(buffer) != len(self.payload):
            raise ProtocolError("not what was expected")
        buffer[:] = self.payload


def vector_of(*tensors, codec=EXACT, part_size_bytes=None):
    """All of it reduced by one member; each tensor in two parts of 4-byte values, unless they are to be larger."""
    infos = [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]
    part_size_bytes = part_size_bytes or tensors[0].numel() * 2
    return RoundVector(tensors, infos, codec, part_size_bytes, [sum(tensor.numel() for tensor in tensors)], 1.0)


def outgoing_of(vector, on_sent=lambda: None, *, there=None, is_average=False, is_urgent=lambda index: False):
    """The parts of a vector; ``there`` has an event for each part that has to be waited for."""

    async def encode(index):
        return describe_part(PartStatus.VALUES, vector.encode(vector.parts[0][index]))

    def is_there(index):
        return there is None or there[index].is_set()

    async def wait(index):
        await there[index].wait()

    sizes = [part.nbytes for part in vector.parts[0]]
    return OutgoingParts(sizes, encode, is_there, wait, on_sent, is_average=is_average, is_urgent=is_urgent)


async def send(vector, wires, *, in_slices):
    sent = []
    outgoing = outgoing_of(vector, lambda: sent.append(sum(len(wire.sent) for wire in wires)))
    outgoing.in_slices = in_slices
    await asyncio.gather(*[send_all(wire, outgoing) for wire in wires])
    assert sent == [sum(len(wire.sent) for wire in wires)]  # once, and when nothing is under way any more


async def receive(incoming, message, payload):
    return await incoming.receive(Wire(payload=payload), message)


@pytest.mark.parametrize("codec", [EXACT, Uniform8BitQuantization()])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("connections", [1, 3])
@alone_in_virtual_time
async def test_parts_arrive_as_they_were(codec, length, connections):
    tensor = torch.randn(2 * length, generator=torch.Generator().manual_seed(0))
    vector, wires = vector_of(tensor, codec=codec), [Wire() for _ in range(connections)]
    await send(vector, wires, in_slices=connections > 1)
    pieces = [piece for wire in wires for piece in wire.sent]
    assert all(len(payload) <= SLICE_BYTES for _, payload in pieces) or connections == 1
    incoming = IncomingParts(vector, vector.parts[0])
    found = {}
    for message, payload in reversed(pieces):
        found.update(enumerate(await receive(incoming, message, payload), message.index))
    assert not incoming.missing
    assert len(found) == len(vector.parts[0])
    for index, part in enumerate(vector.parts[0]):
        expected = codec.extract(vector.encode(part))
        assert torch.equal(found[index], expected)


@alone_in_virtual_time
async def test_connections_share_a_part():
    vector, wires = vector_of(torch.zeros(4 * SLICE_BYTES)), [Wire(), Wire()]
    await send(vector, wires, in_slices=True)
    for wire in wires:
        assert {message.index for message, _ in wire.sent} == set(range(len(vector.parts[0])))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"offset": -SLICE_BYTES},
        {"offset": 2**40},
        {"index": 9},
        {"parts": [PartHeader(int(PartStatus.VALUES), None, 2 * SLICE_BYTES)]},
        *[{"parts": [PartHeader(int(PartStatus.VALUES), METADATA, size)]} for size in (SLICE_BYTES, -1, 2**60, 0)],
    ],
)
@alone_in_virtual_time
async def test_slices_that_are_not_due_are_refused(change):
    vector, wire = vector_of(torch.zeros(SLICE_BYTES)), Wire()
    await send(vector, [wire], in_slices=True)
    incoming = IncomingParts(vector, vector.parts[0])
    (message, payload), (second, second_payload) = wire.sent[:2]
    assert await receive(incoming, message, payload) == []
    with pytest.raises(ProtocolError):
        await receive(incoming, msgspec.structs.replace(second, **change), second_payload)


@alone_in_virtual_time
async def test_a_slice_that_comes_twice_is_refused():
    vector, wire = vector_of(torch.zeros(SLICE_BYTES)), Wire()
    await send(vector, [wire], in_slices=True)
    incoming = IncomingParts(vector, vector.parts[0])
    await receive(incoming, *wire.sent[0])
    with pytest.raises(ProtocolError):
        await receive(incoming, *wire.sent[0])
    with pytest.raises(ProtocolError):  # nor may it be longer than its place
        await receive(incoming, wire.sent[1][0], wire.sent[1][1] + b"\0")


@alone_in_virtual_time
async def test_one_connection_carries_first_of_all_what_others_wait_for():
    vector = vector_of(torch.zeros(SLICE_BYTES))
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


def small_tensors():
    """A large one among many small ones, as in a transformer."""
    lengths = [100] * 5 + [BUNDLE_BYTES // 4 + 1] + [1, 1000, SLICE_BYTES // 4 - 1] + [10] * 40
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(length, generator=generator) for length in lengths]
    return [tensor.to(torch.float16) if i % 7 == 3 else tensor for i, tensor in enumerate(tensors)]


class FreeFormat(NoCompression):
    """Cannot tell how many bytes something takes."""

    def compressed_nbytes(self, size, info):
        return None

    def estimate_compression_ratio(self, info):
        return 1.0


@pytest.mark.parametrize(
    ("codec", "in_slices", "messages"),
    [
        (EXACT, False, 3),
        (EXACT, True, 1 + BUNDLE_BYTES // SLICE_BYTES + 1 + 3),
        (Uniform8BitQuantization(), False, 1),
        (FreeFormat(), False, 49),
    ],
)
@alone_in_virtual_time
async def test_small_parts_travel_together(codec, in_slices, messages):
    vector = vector_of(*small_tensors(), codec=codec, part_size_bytes=2**20)
    wire, incoming = Wire(), IncomingParts(vector, vector.parts[0])
    await send(vector, [wire], in_slices=in_slices)
    assert len(wire.sent) == messages
    found = {}
    for message, payload in wire.sent:
        assert len(payload) <= (SLICE_BYTES if in_slices else BUNDLE_BYTES) or len(message.parts) == 1
        found.update(enumerate(await receive(incoming, message, payload), message.index))
    assert not incoming.missing
    assert list(found) == list(range(len(vector.parts[0])))
    for index, part in enumerate(vector.parts[0]):
        expected = codec.extract(vector.encode(part))
        assert found[index].dtype == expected.dtype
        assert torch.equal(found[index], expected)


@pytest.mark.slow
@alone_in_virtual_time
async def test_any_number_of_tiny_parts_fits_into_headers():
    vector, wire = vector_of(torch.zeros(100_000), part_size_bytes=4), Wire()
    await send(vector, [wire], in_slices=False)
    assert sum(len(message.parts) for message, _ in wire.sent) == 100_000
    assert all(len(pack(Kind.ITEM, message)) < MAX_HEADER_BYTES / 10 for message, _ in wire.sent)


@alone_in_virtual_time
async def test_a_bundle_holds_what_is_there():
    vector, wire = vector_of(*[torch.zeros(2)] * 5, part_size_bytes=2**10), Wire()
    there = [asyncio.Event() for _ in vector.parts[0]]
    for index in (0, 1, 3, 4):
        there[index].set()
    sending = asyncio.ensure_future(send_all(wire, outgoing_of(vector, there=there)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert [(message.index, len(message.parts)) for message, _ in wire.sent] == [(0, 2)]
    there[2].set()
    await sending
    assert [(message.index, len(message.parts)) for message, _ in wire.sent] == [(0, 2), (2, 3)]


@alone_in_virtual_time
async def test_parts_without_an_average_travel_with_others():
    vector, wire = vector_of(*[torch.ones(2)] * 3, part_size_bytes=2**10), Wire()

    async def encode(index):
        return describe_part(PartStatus.VALUES, None if index == 1 else vector.encode(vector.parts[0][index]))

    outgoing = OutgoingParts([8.0] * 3, encode, lambda index: True, asyncio.sleep, lambda: None, is_average=True)
    await send_all(wire, outgoing)
    [(message, payload)] = wire.sent
    first, second, third = await receive(IncomingParts(vector, vector.parts[0]), message, payload)
    assert first.tolist() == third.tolist() == [1.0, 1.0]
    assert second is None


@pytest.mark.parametrize("what", ["too much", "beyond the end", "before the beginning", "too few bytes", "one twice"])
@alone_in_virtual_time
async def test_bundles_that_are_not_due_are_refused(what):
    length = BUNDLE_BYTES // 4 if what == "too much" else 2
    vector = vector_of(*[torch.zeros(length)] * 3, part_size_bytes=2**20)
    headers = [describe_part(PartStatus.VALUES, vector.encode(part))[0] for part in vector.parts[0]]
    first = {"beyond the end": 1, "before the beginning": -1}.get(what, 0)
    payload = bytes(3 * 4 * length - (what == "too few bytes"))
    incoming = IncomingParts(vector, vector.parts[0])
    if what == "one twice":
        await receive(incoming, PartMessage(2, headers[:1]), payload[:8])
    with pytest.raises(ProtocolError):
        await receive(incoming, PartMessage(first, headers), payload)


@alone_in_virtual_time
async def test_what_is_urgent_goes_first():
    vector, wire = vector_of(torch.zeros(BUNDLE_BYTES // 2)), Wire()
    averages = outgoing_of(vector, is_average=True, is_urgent=lambda index: index == 0)
    await send_all(wire, outgoing_of(vector), averages)
    assert [message.is_average for message, _ in wire.sent] == [True, False, False, True]


@pytest.mark.parametrize("in_slices", [False, True])
@alone_in_virtual_time
async def test_only_gaps_are_sent_again(in_slices):
    vector = vector_of(*[torch.randn(SLICE_BYTES) for _ in range(4)])  # eight parts of two slices
    first, again, sent = Wire(), Wire(), []
    outgoing = outgoing_of(vector, lambda: sent.append(True))
    outgoing.in_slices = in_slices
    await outgoing.send_next(first)
    outgoing.repeat([(1, 3), (7, 8)])
    assert outgoing.left == 3
    assert not outgoing.is_taken
    await send_all(again, outgoing)
    assert {message.index for message, _ in again.sent} <= {1, 2, 7}
    indices = [message.index + k for message, _ in again.sent for k in range(len(message.parts))]
    assert sorted(set(indices)) == [1, 2, 7]
    count = len(sent)
    outgoing.repeat([])
    assert len(sent) == count + 1, "nothing is left to send"


@alone_in_virtual_time
async def test_a_part_whose_connection_breaks_is_still_missing():
    vector = vector_of(torch.randn(2 * SLICE_BYTES), torch.randn(8))
    incoming, wire = IncomingParts(vector, vector.parts[0]), Wire()
    outgoing = outgoing_of(vector)
    await send_all(wire, outgoing)
    message, payload = wire.sent[0]
    wire.payload = payload[:-1]
    before = incoming.gaps()
    with pytest.raises(ProtocolError):
        await incoming.receive(wire, message)
    assert incoming.gaps() == before


@alone_in_virtual_time
async def test_a_part_of_which_slices_were_lost_comes_again_as_a_whole():
    tensor = torch.randn(8 * SLICE_BYTES, generator=torch.Generator().manual_seed(0))
    vector, wires = vector_of(tensor), [Wire(), Wire()]
    await send(vector, wires, in_slices=True)
    incoming, found = IncomingParts(vector, vector.parts[0]), {}
    for message, payload in wires[0].sent:  # the other connection breaks
        assert not await receive(incoming, message, payload)
    incoming.drop_slices()

    outgoing, again = outgoing_of(vector), Wire()
    outgoing.in_slices = True
    outgoing.repeat(incoming.gaps())
    await send_all(again, outgoing)
    for message, payload in again.sent:
        found.update(enumerate(await receive(incoming, message, payload), message.index))
    for index, part in enumerate(vector.parts[0]):
        assert torch.equal(found[index], EXACT.extract(vector.encode(part)))


@alone_in_virtual_time
async def test_a_slice_whose_connection_breaks_is_still_missing():
    vector, wire = vector_of(torch.randn(2 * SLICE_BYTES)), Wire()
    await send(vector, [wire], in_slices=True)
    incoming, (message, payload) = IncomingParts(vector, vector.parts[0]), wire.sent[0]

    class Broken(Wire):
        async def read_payload_into(self, buffer):
            raise ProtocolError("cut")

    with pytest.raises(ProtocolError, match="cut"):
        await incoming.receive(Broken(payload=payload), message)
    for message, payload in wire.sent:
        await receive(incoming, message, payload)
    assert not incoming.missing
