"""The channel for the tensors of two peers, in virtual time: what it carries, and what happens if it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from shoal.compression import BlockwiseQuantization, CompressionBase
from shoal.compression.base import SerializedTensor, TensorMetadata
from shoal.errors import MicrobatchError, P2PHandlerError, ProtocolError, StreamClosedError
from shoal.p2p import Call, PeerID
from shoal.serving.tensors import EXACT, PIECE_VALUES, Pieces, TensorList, TensorsTooLargeError
from shoal.stages import channel as channels
from shoal.stages.channel import (
    CHANNEL_SECONDS,
    Channel,
    ChannelItem,
    ChannelStart,
    Key,
    SilentPeerError,
    UnsendableError,
)
from shoal.stages.hop import Request, StageReply
from shoal.stages.host import StageService
from shoal.testing import run
from tests.stages.chains import PASS_SECONDS, PATIENCE, Chain

STAGES = 3
ODD = torch.ones(2).to(torch.float8_e4m3fn)
"""Such tensors cannot be sent."""
SILENCE = PATIENCE.request_timeout


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PeerID, PeerID, Call]]:
    """The channels that are opened: by which peer, to which one, and the call."""
    found: list[tuple[PeerID, PeerID, Call]] = []
    original = StageService._open_channel

    @asynccontextmanager
    async def note(self: StageService, peer: PeerID, anew: bool) -> AsyncIterator[Call]:
        async with original(self, peer, anew) as call:
            found.append((self.p2p.peer_id, peer, call))
            yield call

    monkeypatch.setattr(StageService, "_open_channel", note)
    return found


# --- two ends ---------------------------------------------------------------------------------------------------------


def between(test: Callable[[Channel, Channel], Awaitable[None]]) -> None:
    """Run something with both ends of a channel, that of the caller first."""

    async def main() -> None:
        chain = Chain(1)
        (machine, _, service), (far, callee, server) = await chain.start(), await chain.start()
        await far.run(server.start())

        async def call() -> None:
            async with (
                service.channel_to(callee.peer_id, anew=False) as channel,
                server._channels.of(service.p2p.peer_id, channel.number) as far_end,
            ):
                await test(channel, far_end)

        await machine.run(call())

    run(main())


def key(sequence: int) -> Key:
    return Key(1, b"driver", sequence)


def test_tensors_go_both_ways_at_once() -> None:
    async def test(near: Channel, far: Channel) -> None:
        there = {"a": [torch.randn(3, PIECE_VALUES), torch.arange(5)], "b": None}
        back = torch.randn(2 * PIECE_VALUES + 1)
        with far.expecting(key(1)) as arriving, near.expecting(key(1)) as returning:
            await asyncio.gather(
                near.send(key(1), there, lambda each: EXACT), far.send(key(1), back, lambda each: EXACT)
            )
            arrived = await arriving
            assert torch.equal(arrived["a"][0], there["a"][0])
            assert torch.equal(arrived["a"][1], there["a"][1])
            assert arrived["b"] is None
            assert torch.equal(await returning, back)

    between(test)


@pytest.mark.parametrize("codec", [EXACT, BlockwiseQuantization()])
def test_tensors_that_nobody_expects_are_thrown_away(codec: CompressionBase) -> None:
    async def test(near: Channel, far: Channel) -> None:
        sizes = (5, PIECE_VALUES, 3 * PIECE_VALUES + 1)
        with far.expecting(key(2)) as arriving:
            for sequence in (1, 2, 3):
                await near.send(key(sequence), [torch.ones(size) for size in sizes], lambda each: codec)
            assert [tuple(each.shape) for each in await arriving] == [(size,) for size in sizes]

    between(test)


def test_tensors_that_are_too_large_concern_their_microbatch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_BYTES", 1000)

    async def test(near: Channel, far: Channel) -> None:
        with far.expecting(key(1)) as large, far.expecting(key(2)) as small:
            await near.send(key(1), torch.ones(PIECE_VALUES + 1), lambda each: EXACT)
            await near.send(key(2), torch.ones(250), lambda each: EXACT)
            assert (await small).sum() == 250
            with pytest.raises(TensorsTooLargeError, match="1048580 bytes are too large: allowed are 1000"):
                await large

    between(test)


class Failing(BlockwiseQuantization):
    """Fails at the second piece of a tensor."""

    pieces = 0

    def compress(self, tensor: torch.Tensor, *args: Any, **options: Any) -> SerializedTensor:
        self.pieces += 1
        if self.pieces == 2:
            raise RuntimeError("no memory")
        return super().compress(tensor, *args, **options)


def test_what_cannot_be_sent_concerns_its_microbatch_alone() -> None:
    async def test(near: Channel, far: Channel) -> None:
        with far.expecting(key(2)) as arriving:
            with pytest.raises(UnsendableError, match=r"TypeError: .* can be sent, got set"):
                await near.send(key(1), [torch.ones(2), {1}], lambda each: EXACT)
            with pytest.raises(UnsendableError, match="float8_e4m3fn cannot be sent"):
                await near.send(key(1), torch.ones(2).to(torch.float8_e4m3fn), lambda each: EXACT)
            with pytest.raises(UnsendableError, match="up to 2048 places"):
                await near.send(key(1), [0] * 2048, lambda each: EXACT)
            with pytest.raises(UnsendableError, match="over the limit of 1048576 for its header"):
                await near.send(key(1), ["x" * 2**20, torch.ones(2)], lambda each: EXACT)
            with pytest.raises(UnsendableError, match="no memory"):
                await near.send(key(1), torch.ones(2 * PIECE_VALUES), lambda each: Failing())
            await near.send(key(2), torch.ones(2), lambda each: EXACT)
            assert (await arriving).sum() == 2

    between(test)


def test_small_tensors_do_not_wait_for_large_ones() -> None:
    async def test(near: Channel, far: Channel) -> None:
        large = torch.ones(50 * PIECE_VALUES)
        with far.expecting(key(1)) as first, far.expecting(key(2)) as second:
            sending = asyncio.ensure_future(near.send(key(1), large, lambda each: EXACT))
            await asyncio.sleep(0.001)
            await near.send(key(2), torch.ones(3), lambda each: EXACT)
            assert (await second).sum() == 3
            assert not sending.done()
            assert torch.equal(await first, large)
            await sending

    between(test)


def test_what_nobody_wants_any_more_is_not_sent_to_its_end() -> None:
    async def test(near: Channel, far: Channel) -> None:
        large = torch.ones(50 * PIECE_VALUES)
        with far.expecting(key(1)) as first, far.expecting(key(2)) as second, far.expecting(key(3)) as third:
            sending = [asyncio.ensure_future(near.send(key(n), large, lambda each: EXACT)) for n in (1, 2)]
            await asyncio.sleep(0.001)
            assert not any(each.done() for each in sending)
            for each in sending:
                each.cancel()
            await near.send(key(3), torch.ones(3), lambda each: EXACT)
            assert (await third).sum() == 3
            assert near._outgoing.empty()
            assert not first.done()
            assert not second.done()
            await near.send(key(1), large[:5], lambda each: EXACT)  # once more
            assert torch.equal(await first, large[:5])

    between(test)


def test_tensors_that_are_expected_twice_go_to_the_last_one() -> None:
    async def test(near: Channel, far: Channel) -> None:
        with far.expecting(key(1)) as first:
            with far.expecting(key(1)) as second:
                with pytest.raises(StreamClosedError, match="once more"):
                    await first
                await near.send(key(1), torch.ones(3), lambda each: EXACT)
                assert (await second).sum() == 3
            await near.send(key(1), torch.ones(3), lambda each: EXACT)

    between(test)


@pytest.mark.parametrize(("how", "error"), [("break_connections", StreamClosedError), ("partition", SilentPeerError)])
def test_all_that_wait_are_told_of_the_end(how: str, error: type[Exception]) -> None:
    async def main() -> None:
        chain = Chain(1)
        (machine, caller, service), (far, callee, server) = await chain.start(), await chain.start()
        await far.run(server.start())
        ready, found = asyncio.Event(), list[Any]()

        async def call() -> None:
            async with (
                service.channel_to(callee.peer_id, anew=False) as channel,
                server._channels.of(caller.peer_id, channel.number) as other,
            ):
                with channel.expecting(key(1)) as here, other.expecting(key(2)) as there:
                    ready.set()
                    found.extend(await asyncio.gather(here, there, return_exceptions=True))
                with channel.expecting(key(3)) as late, pytest.raises(error):
                    await late
                with pytest.raises(error):
                    await channel.send(key(3), torch.ones(1), lambda each: EXACT)

        calling = machine.spawn(call())
        await ready.wait()
        groups = (machine, far) if how == "break_connections" else ([machine], [far])
        getattr(chain.network, how)(*groups)
        await calling
        assert isinstance(found[0], error)
        assert isinstance(found[1], StreamClosedError)

    run(main())


def listed(dtype: str, *shape: int, form: Any = "x") -> TensorList:
    return TensorList(form, (TensorMetadata(0, dtype, shape),), (4,))


@pytest.mark.parametrize(
    "message",
    [
        listed("float33", 4),
        listed("float32", 2**60),
        listed("float32", 4),
        listed("float32", 1, form="y"),
        TensorList("x", (TensorMetadata(0, "float32", (0,)),) * 2000, (4,)),
    ],
)
@pytest.mark.parametrize("is_expected", [True, False])
def test_malformed_tensors_concern_their_microbatch_alone(message: TensorList, is_expected: bool) -> None:
    async def main() -> None:
        chain = Chain(1)
        (machine, caller, _), (far, callee, server) = await chain.start(), await chain.start()
        await far.run(server.start())

        async def lie() -> None:
            async with StageService.get_stub(caller, callee.peer_id, namespace="run").rpc_channel() as call:
                await call.send(ChannelStart(number=5))
                async with server._channels.of(caller.peer_id, 5) as far_end:
                    with far_end.expecting(key(1 if is_expected else 3)) as bad, far_end.expecting(key(2)) as good:
                        await call.send(ChannelItem(*key(1), begins=True))
                        await call.send(message, bytes(4))
                        await call.send(ChannelItem(*key(1), begins=False))
                        await call.send(Pieces((4,)), bytes(4))
                        await call.send(ChannelItem(*key(2), begins=True))
                        await call.send(listed("float32", 1), bytes(4))
                        assert (await good).tolist() == [0]
                        if is_expected:
                            with pytest.raises((TensorsTooLargeError, ProtocolError)):
                                await bad
                        assert is_expected or not bad.done()

        await machine.run(lie())

    run(main())


@pytest.mark.parametrize("messages", [[TensorList("x", (), ())], [ChannelItem(*key(1), begins=True)]])
def test_broken_protocol_ends_the_channel(messages: list[Any]) -> None:
    async def main() -> None:
        chain = Chain(1)
        (machine, caller, _), (far, callee, server) = await chain.start(), await chain.start()
        await far.run(server.start())

        async def lie() -> None:
            async with StageService.get_stub(caller, callee.peer_id, namespace="run").rpc_channel() as call:
                await call.send(ChannelStart(number=5))
                async with server._channels.of(caller.peer_id, 5) as far_end:
                    with far_end.expecting(key(1)) as arriving:
                        for header in messages:
                            await call.send(header)
                        await call.send_end()
                        with pytest.raises(StreamClosedError):
                            await arriving
                await call.receive(ChannelItem)

        with pytest.raises(P2PHandlerError):
            await machine.run(lie())

    run(main())


# --- chains -----------------------------------------------------------------------------------------------------------


async def chain_of(peers: int = 1) -> Chain:
    chain = Chain(STAGES, target=8)
    for stage in range(STAGES):
        for _ in range(peers):
            await chain.add(stage)
    await chain.add_driver()
    return chain


def served(chain: Chain) -> int:
    return sum(len(service._channels._served) for _, _, service in chain._started.values())


def test_microbatches_of_two_peers_share_a_channel(opened: list[Any]) -> None:
    async def main() -> None:
        chain = await chain_of()
        assert None not in await chain.drive(chain.drivers[0][1], range(40))
        assert set(Counter((caller, callee) for caller, callee, _ in opened).values()) == {1}
        assert len(opened) == served(chain) == STAGES
        await asyncio.sleep(3 * SILENCE)
        assert not served(chain)
        assert all(call.clean for *_, call in opened)  # their connections can carry other calls
        assert None not in await chain.drive(chain.drivers[0][1], range(40, 44))
        assert len(opened) == 2 * STAGES

    run(main())


def test_new_channels_are_opened_from_time_to_time(opened: list[Any]) -> None:
    """Otherwise, one that was opened through a relay would stay there."""

    async def main() -> None:
        chain = await chain_of()
        began = asyncio.get_running_loop().time()
        seconds = 0.0
        number = 0
        while seconds < 3.5 * CHANNEL_SECONDS:
            assert None not in await chain.drive(chain.drivers[0][1], range(number, number + 8))
            number += 8
            seconds = asyncio.get_running_loop().time() - began
        assert set(Counter((caller, callee) for caller, callee, _ in opened).values()) <= {3, 4}
        assert served(chain) <= 2 * STAGES
        assert not chain.metric("hops_repaired")
        chain.check_counts(number)

    run(main())


@pytest.mark.parametrize("peers", [1, 2])
def test_nothing_is_lost_if_only_channels_break(peers: int, opened: list[Any]) -> None:
    async def main() -> None:
        chain = await chain_of(peers)
        driving = asyncio.ensure_future(chain.drive(chain.drivers[0][1], range(40)))
        while not driving.done():
            await asyncio.sleep(20 * PASS_SECONDS)
            for *_, call in opened:
                if not call.sent_end:  # otherwise its connection carries another call now
                    call.connection.stream.abort()
        assert None not in await driving
        assert chain.metric("hops_repaired")["same peer"]
        assert not chain.metric("hops_repaired")["another peer"]
        assert not chain.metric("microbatches_resent")
        assert chain.passes == 40 * (2 * STAGES - 1)  # nothing is computed twice
        chain.check_counts(40)
        chain.check_steps()

    run(main())


def test_request_whose_channel_does_not_come_takes_no_place() -> None:
    async def main() -> None:
        chain = await chain_of()
        machine, liar, _ = await chain.start()
        _, host, _ = chain.hosts[0]
        [callee] = chain.holders[0]

        async def ask() -> None:
            async with StageService.get_stub(liar, callee, namespace="run").rpc_carry() as call:
                await call.send(Request(liar.peer_id.to_bytes(), 1, 0, 0, 1, True, channel=9))
                await call.receive(StageReply)

        with pytest.raises(P2PHandlerError, match="no channel 9"):
            await machine.run(ask())
        assert not len(host.works)

    run(main())


def test_channel_in_use_stays_open(opened: list[Any]) -> None:
    async def main() -> None:
        chain = await chain_of()
        for number in range(20):
            assert None not in await chain.drive(chain.drivers[0][1], [number])
            await asyncio.sleep(SILENCE / 4)
        assert len(opened) == STAGES

    run(main())


@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_tensors_that_cannot_be_sent_disturb_no_other_driver(what: str) -> None:
    async def main(with_evil: bool) -> float:
        chain = await chain_of(2)
        honest, evil = chain.drivers[0][1], await chain.add_driver()
        for _, host, compute in chain.hosts:
            name = "forward" if what == "outputs" else "backward" if host.next_hop is not None else "losses"
            original = getattr(compute, name)

            async def computed(task: Any, *args: Any, original: Any = original) -> Any:
                found = await original(task, *args)
                return found if task.driver != evil._peer else ODD if what != "gradients" else (ODD, [])

            setattr(compute, name, computed)
        machine = next(machine for machine, each in chain.drivers if each is evil)
        lying = machine.spawn(evil.carry(torch.ones(1, 2), torch.tensor([0.5]))) if with_evil else None
        began = asyncio.get_running_loop().time()
        assert None not in await chain.drive(honest, range(20))
        seconds = asyncio.get_running_loop().time() - began
        if lying is not None:
            with pytest.raises(MicrobatchError, match=r"cannot .*: ValueError: tensors of type torch\.float8_e4m3fn"):
                await lying
        return seconds

    assert run(main(with_evil=True)) < 1.5 * run(main(with_evil=False))


def test_peer_that_leaves_opens_no_more_channels() -> None:
    """Even if others still open channels to it."""

    async def main() -> None:
        chain = Chain(1)
        (machine, leaving, service), (far, other, server) = await chain.start(), await chain.start()
        await machine.run(service.start())

        async def use(service: StageService, peer: PeerID) -> None:
            async with (
                service.channel_to(peer, anew=False) as channel,
                service_of[peer]._channels.of(service.p2p.peer_id, channel.number),
            ):
                pass

        service_of = {leaving.peer_id: service, other.peer_id: server}
        await machine.run(service._channels.stop())
        await far.run(use(server, leaving.peer_id))
        with pytest.raises(StreamClosedError, match="this peer leaves"):
            await machine.run(use(service, other.peer_id))

    run(main())
