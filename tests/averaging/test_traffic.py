"""Parts and averages between two members, on whichever call they come."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging.messages import PartHeader, PartMessage, PartStatus, Resume
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.reducer import PartReducer
from shoal.averaging.round.sending import FlowControl
from shoal.averaging.round.traffic import KEPT_BYTES, SentAverages, Traffic
from shoal.compression import CompressionInfo, NoCompression
from shoal.errors import ProtocolError
from tests.device import on_cpu_only
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = [pytest.mark.once, on_cpu_only]  # all values are in host memory here

NO_MORE = PartMessage()


class Incoming:
    """A call on which the other side has sent all of this already."""

    def __init__(self, *messages):
        self.messages, self.payload = list(messages), b""

    @property
    def payload_size(self):
        return len(self.payload)

    async def receive(self, kind):
        if not self.messages:
            return None
        message, self.payload = self.messages.pop(0)
        return message

    async def read_payload_into(self, buffer):
        buffer[:] = self.payload


class Sides:
    """Two members of two, who each reduce one part; this is the first one."""

    def __init__(self, alpha=1.0):
        self.tensor = torch.zeros(20)
        info = CompressionInfo.from_tensor(self.tensor, key=0)
        self.vector = RoundVector([self.tensor], [info], NoCompression(), 40, [10, 10], alpha)
        self.reducer = PartReducer(self.vector.parts[0], [1], self.vector.values, 0, {0: 1.0})
        self.received = asyncio.Event()
        self.traffic = Traffic(
            self.vector,
            self.reducer,
            0,
            1,
            gives=True,
            takes=True,
            pace=FlowControl(),
            on_not_finite=lambda: None,
            on_delivered=lambda: None,
            on_received=self.received.set,
        )

    def message(self, value, *, is_average):
        part = self.vector.parts[1 if is_average else 0][0]
        encoded = NoCompression().compress(torch.full((10,), value), part.info)
        payload = bytes(encoded.buffer)
        header = PartHeader(int(PartStatus.VALUES), encoded.metadata, len(payload))
        return PartMessage(0, [header], is_average), payload

    def begin(self):
        """The other one begins."""
        self.traffic.begin(1, own=False)
        self.reducer.begin(1, 3.0)

    async def receive(self, *messages):
        return await self.traffic.receive(Incoming(*messages), lambda: 5.0)


@alone_in_virtual_time
async def test_early_parts_wait_for_the_weight():
    sides = Sides()
    part = sides.message(4.0, is_average=False)
    receiving = asyncio.ensure_future(sides.receive(part, (NO_MORE, b"")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not receiving.done()
    assert sides.traffic.parts_in.missing
    sides.begin()
    assert await receiving == NO_MORE
    assert (await sides.reducer.average(0)).values.tolist() == [3.0] * 10


class Late(Incoming):
    """A call on which all of this takes a while to come."""

    def __init__(self, seconds, *messages):
        super().__init__(*messages)
        self.seconds = seconds

    async def receive(self, kind):
        await asyncio.sleep(self.seconds)
        return await super().receive(kind)


@alone_in_virtual_time
async def test_a_call_may_be_silent_for_longer_once_all_parts_are_here():
    """On several calls the last part comes on one, and the others carry averages, for which their member may wait."""
    sides = Sides()
    sides.begin()
    part = sides.message(4.0, is_average=False)

    def limit():
        return 5.0 if sides.traffic.parts_in.missing else 20.0

    calls = [Late(3.0, part, (NO_MORE, b"")), Late(12.0, (NO_MORE, b""))]
    assert await asyncio.gather(*[sides.traffic.receive(call, limit) for call in calls]) == [NO_MORE, NO_MORE]
    with pytest.raises(TimeoutError):
        await sides.traffic.receive(Late(21.0, (NO_MORE, b"")), limit)


@alone_in_virtual_time
async def test_an_average_after_the_end_changes_nothing():
    sides = Sides()
    sides.traffic.stop()
    with pytest.raises(ProtocolError):
        await sides.receive(sides.message(4.0, is_average=True))
    assert not sides.tensor.any()
    assert sides.vector.held == [0, 0]


@alone_in_virtual_time
async def test_averages_are_applied():
    sides = Sides()
    assert await sides.receive(sides.message(4.0, is_average=True)) is None
    assert sides.tensor.tolist() == [0.0] * 10 + [4.0] * 10
    assert sides.received.is_set()


@pytest.mark.parametrize("is_average", [False, True])
@alone_in_virtual_time
async def test_nothing_comes_twice(is_average):
    sides = Sides()
    sides.begin()
    message = sides.message(4.0, is_average=is_average)
    with pytest.raises(ProtocolError):
        await sides.receive(message, message)


@alone_in_virtual_time
async def test_an_end_before_the_last_part_is_an_error():
    sides = Sides()
    sides.traffic.begin(2, own=True)
    sides.begin()
    await sides.receive(sides.message(4.0, is_average=True))
    sides.traffic.end(own=True)
    sides.traffic.end(own=False)  # the part may still come on the second call of this member
    with pytest.raises(ProtocolError, match="ended before 1"):
        sides.traffic.end(own=True)


@alone_in_virtual_time
async def test_after_a_break_only_gaps_are_asked_for():
    sides = Sides()
    sides.begin()
    assert sides.traffic.gaps() == Resume([(0, 1)], [(0, 1)])
    await sides.receive(sides.message(4.0, is_average=True))
    sides.traffic.restart(own=True, others=True)
    assert sides.traffic.gaps() == Resume([(0, 1)], [])


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@alone_in_virtual_time
async def test_averages_are_kept_until_they_are_confirmed(alpha):
    sides, sent = Sides(alpha), []
    sides.begin()

    class Call:
        async def send(self, message, *payload):
            sent.append((message.index, b"".join(map(bytes, payload))))

    async def send_averages():
        await sides.traffic.send(Call(), sides.traffic.averages_out, 1)

    await sides.receive(sides.message(4.0, is_average=False))
    await send_averages()
    sides.traffic.restart(own=True, others=True)
    assert sides.traffic.send_missing(Resume([], [(0, 1)]))
    assert not sides.traffic.send_missing(Resume([], [])), "the first list counts, the others are the same"
    await send_averages()
    assert sent[0] == sent[1]
    message, payload = sides.message(4.0, is_average=True)
    message.held = 1
    await sides.receive((message, payload))
    sides.traffic.restart(own=True, others=True)
    assert sides.traffic.send_missing(Resume([], [(0, 1)]))
    if alpha == 1:  # it is in the vector of this member as well
        await send_averages()
        assert sent[2] == sent[0]
        return
    with pytest.raises(ProtocolError, match="holds the average"):
        await send_averages()


@pytest.mark.parametrize(
    "gaps",
    [
        Resume([(0, 2)], []),
        Resume([], [(0, 2)]),
        Resume([(1, 0)], []),
        Resume([(0, 1), (0, 1)], []),
        Resume([(0, 2**50)], []),
    ],
)
@alone_in_virtual_time
async def test_nobody_can_lack_what_does_not_exist(gaps):
    sides = Sides()
    with pytest.raises(ProtocolError, match="lacks parts"):
        sides.traffic.send_missing(gaps)


@alone_in_virtual_time
async def test_averaged_parts_are_not_sent_again():
    """The average has taken its place."""
    sides = Sides()
    await sides.receive(sides.message(4.0, is_average=True))
    with pytest.raises(ProtocolError, match="that it has averaged"):
        sides.traffic.send_missing(Resume([(0, 1)], []))


def test_not_more_than_a_limit_is_kept():
    kept = SentAverages()
    for index in range(10):
        kept.add(index, (PartHeader(int(PartStatus.VALUES), None, KEPT_BYTES // 4), ()))
    assert [index for index in range(10) if kept.get(index)] == [6, 7, 8, 9]
    kept.confirm(8)
    assert len(kept) == 2
