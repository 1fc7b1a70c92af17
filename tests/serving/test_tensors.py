"""Structures of tensors on a call: what arrives, how it is cut, and what malformed ones cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.compression import BlockwiseQuantization, Float16Compression, Quantile8BitQuantization, TensorMetadata
from shoal.errors import P2PHandlerError, ProtocolError
from shoal.p2p import Call, P2PContext, ServicerBase
from shoal.serving.tensors import (
    MAX_DEPTH,
    MAX_PLACES,
    PIECE_VALUES,
    Departing,
    TensorList,
    form_of,
    messages_of,
    receive_tensors,
    send_tensors,
    tensors_of,
    with_form,
)
from tests.p2p.peers import KINDS, Peers

pytestmark = [pytest.mark.oldest, pytest.mark.parametrize("kind", KINDS)]
MAX_BYTES = 2**26


class Echo(ServicerBase):
    """Returns what it receives, with the codec that it was given."""

    codec: Any = None

    async def rpc_echo(self, call: Call, context: P2PContext) -> None:
        structure, _ = await receive_tensors(call, MAX_BYTES)
        await send_tensors(call, structure, None if self.codec is None else lambda tensor: self.codec, end=True)


async def echoed(kind: str, structure: Any, codec: Any = None) -> Any:
    """Send a structure to another peer, and receive what that sends back."""
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        service = Echo()
        service.codec = codec
        await service.add_p2p_handlers(server)
        async with Echo.get_stub(caller, server.peer_id).rpc_echo() as call:
            sent = await send_tensors(call, structure, None if codec is None else lambda tensor: codec, end=True)
            back, received = await receive_tensors(call, MAX_BYTES, silence=30)
        assert sent == received
        return back


async def test_structure_arrives_as_it_was_sent(kind: str) -> None:
    large = torch.randn(3, PIECE_VALUES // 2 + 1)
    back = await echoed(
        kind,
        {
            "b": [torch.arange(5), None, (True, 2, 0.5, "text")],
            "a": large.clone().requires_grad_(),
            "scalar": torch.tensor(3.0, dtype=torch.float64),
            "none": torch.empty(0, 4),
            "expanded": torch.tensor(3.0).expand(1, 1),
            "transposed": large[:, :7].T,
        },
    )
    assert list(back) == ["b", "a", "scalar", "none", "expanded", "transposed"]
    assert back["b"][1:] == [None, (True, 2, 0.5, "text")]
    assert torch.equal(back["b"][0], torch.arange(5))
    assert back["a"].requires_grad
    assert torch.equal(back["a"], large)
    assert back["scalar"].shape == ()
    assert back["scalar"] == 3
    assert back["none"].shape == (0, 4)
    assert back["expanded"].tolist() == [[3]]
    assert torch.equal(back["transposed"], large[:, :7].T)


@pytest.mark.parametrize("codec", [Float16Compression(), BlockwiseQuantization(), Quantile8BitQuantization()])
async def test_codec_rounds_floats_and_no_integers(kind: str, codec: Any) -> None:
    floats, integers = torch.randn(2 * PIECE_VALUES + 17), torch.randint(0, 2**40, (1000,))
    back, same = await echoed(kind, (floats, integers), codec)
    assert 0 < (back - floats).norm() < 0.05 * floats.norm()
    assert torch.equal(same, integers)


async def test_error_of_server_arrives_instead_of_tensors(kind: str) -> None:
    with pytest.raises(P2PHandlerError, match="allowed are"):
        await echoed(kind, torch.empty(MAX_BYTES // 4 + 1))


@pytest.mark.parametrize(
    ("listed", "sizes", "complaint"),
    [
        (TensorMetadata(0, "float32", (4,)), (17,), "a piece of 17 bytes, expected 16"),
        (TensorMetadata(0, "float32", (4,)), (), "0 pieces of tensors, expected 1"),
        (TensorMetadata(0, "float32", (2**40,)), (16,), "allowed are"),
        (TensorMetadata(99, "float32", (4,)), (16,), "unknown compression code"),
        (TensorMetadata(0, "float33", (4,)), (16,), "unknown element type"),
    ],
)
async def test_malformed_tensors_are_refused(kind: str, listed: Any, sizes: Any, complaint: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Echo().add_p2p_handlers(server)
        async with Echo.get_stub(caller, server.peer_id).rpc_echo() as call:
            await call.send(TensorList("x", (listed,), sizes), bytes(sum(sizes)), end=True)
            with pytest.raises(P2PHandlerError, match=complaint):
                await receive_tensors(call, MAX_BYTES)


async def test_silence_of_sender_is_an_error(kind: str) -> None:
    async with Peers(kind) as peers:
        server, caller = await peers.two()
        await Echo().add_p2p_handlers(server)
        async with Echo.get_stub(caller, server.peer_id).rpc_echo() as call:
            with pytest.raises(TimeoutError):
                await receive_tensors(call, MAX_BYTES, silence=0.01)


def test_small_tensors_share_a_message(kind: str) -> None:
    small, large = TensorMetadata(0, "float32", (100,)), TensorMetadata(0, "float32", (PIECE_VALUES + 1,))
    assert [len(message) for message in messages_of((small, small, large, small))] == [2, 1, 2]
    assert messages_of(()) == [[]]


@pytest.mark.parametrize("form", [["l", "x"], ["t", ["x", "x"]], ["d", ["x"]], 5, ["v", []], ["l", []]])
def test_malformed_form_is_refused(kind: str, form: Any) -> None:
    with pytest.raises(ProtocolError):
        with_form(form, [torch.zeros(1)])


def test_deep_form_is_refused(kind: str) -> None:
    form: Any = "x"
    for _ in range(50):
        form = ["l", [form]]
    with pytest.raises(ProtocolError, match="too deep"):
        with_form(form, [torch.zeros(1)])


def test_what_cannot_be_sent_is_named(kind: str) -> None:
    with pytest.raises(TypeError, match="got set"):
        form_of([{1}])


def test_tensors_of_more_than_can_be_sent_at_once_can_be_counted(kind: str) -> None:
    structure = [torch.ones(1)] * (MAX_PLACES + 1)
    assert len(tensors_of(structure)) == MAX_PLACES + 1
    deep: Any = torch.ones(1)
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    assert len(tensors_of(deep)) == 1
    for each in ([0] * MAX_PLACES, deep):
        with pytest.raises(ValueError, match="only structures of up to 2048 places, 16 deep, can be sent at once"):
            Departing(each)
