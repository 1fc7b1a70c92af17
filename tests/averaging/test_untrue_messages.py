"""Messages that are well-formed but cannot be true: they are refused while they are decoded, or change nothing."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
import torch

from shoal.averaging import DecentralizedAverager
from shoal.averaging.groups.group import learn, record_of
from shoal.averaging.groups.settings import MAX_SETTINGS, difference_of
from shoal.averaging.messages import (
    MAX_BANDWIDTH,
    MAX_GATHERED_BYTES,
    Assignment,
    BeginReduce,
    Code,
    Commit,
    GroupStart,
    Invitation,
    JoinReply,
    JoinRequest,
    Member,
    MembersLost,
    PartMessage,
    PeerAddresses,
)
from shoal.base.clock import get_dht_time
from shoal.base.tasks import cancel_and_wait
from shoal.dht import DHT
from shoal.errors import ProtocolError
from shoal.net.transport import MOST, decode_header
from tests.averaging.swarm import Swarm, make_control
from tests.dht.virtual_time import alone_in_virtual_time, in_virtual_time

TRUE = {
    JoinRequest: {"group_key": "run.0b", "settings": {}, "expiration": 2e9, "mode": 0},
    JoinReply: {"code": 1},
    Invitation: {"group_key": "run.0b", "expiration": 2e9},
    Member: {"peer": {"peer_id": b"1", "addresses": []}, "mode": 0, "share": 1},
    PeerAddresses: {"peer_id": b"1"},
    BeginReduce: {"round_id": b"1", "weight": 1.0},
    PartMessage: None,
    Commit: {"type": 8, "weights": [1.0]},
    MembersLost: {"type": 4, "lost": {1: 1}},
    Assignment: {"type": 5},
}
NOT_A_TIME = [math.nan, math.inf, -math.inf, -1.0, 1e300, "soon", None]
NOT_A_COUNT = [-1, MOST, 1.5]
UNTRUE = [
    *((kind, "expiration", value) for kind in (JoinRequest, JoinReply, Invitation) for value in NOT_A_TIME),
    *((JoinRequest, "bandwidth", value) for value in (math.nan, math.inf, -1.0, 2 * MAX_BANDWIDTH)),
    *((kind, "mode", value) for kind in (JoinRequest, Member) for value in (-1, 3)),
    *((kind, "gathered", bytes(MAX_GATHERED_BYTES + 1)) for kind in (JoinRequest, Member)),
    *((JoinRequest, "expected_group_size", value) for value in NOT_A_COUNT),
    *((Member, "share", value) for value in NOT_A_COUNT),
    *((PeerAddresses, "peer_id", value) for value in (b"", bytes(65))),
    *((BeginReduce, "weight", value) for value in (math.nan, math.inf, -1.0, 1.7e308)),
    *((BeginReduce, "round_id", value) for value in (bytes(65), 5)),
    *((BeginReduce, "stripes", value) for value in NOT_A_COUNT),
    *((Commit, "weights", [1.0, value]) for value in (math.nan, math.inf, -1.0)),
    *((MembersLost, "lost", {value: 1}) for value in NOT_A_COUNT),
    *((Assignment, "send", [(0, value, 2)]) for value in NOT_A_COUNT),
]


@pytest.mark.parametrize(
    ("kind", "field", "value"), UNTRUE, ids=lambda each: repr(getattr(each, "__name__", each))[:20]
)
def test_what_cannot_be_true_is_refused_while_it_is_decoded(kind, field, value):
    fields = TRUE[kind]
    decode_header(msgspec.msgpack.encode(fields), kind)  # the other fields are not the reason
    with pytest.raises(ProtocolError, match=field):
        decode_header(msgspec.msgpack.encode({**fields, field: value}), kind)


@pytest.mark.parametrize("position", [0, 3])
def test_a_part_has_no_place_before_the_first(position):
    honest = [0, [], False, 0]
    decode_header(msgspec.msgpack.encode(honest), PartMessage)
    with pytest.raises(ProtocolError):
        decode_header(msgspec.msgpack.encode([*honest[:position], -1, *honest[position + 1 :]]), PartMessage)


# What a peer that takes part answers to who asks to be led.
LIES = {
    "it will start in a thousand years": JoinReply(code=Code.ACCEPTED, expiration=3e10),
    "ask somebody without a sensible address": JoinReply(
        code=Code.NOT_A_LEADER, expiration=2e9, better_leader=PeerAddresses(b"nobody", ["/ip4/1.2.3.4/tcp/99999"])
    ),
    "ask yourself": None,
    "ask me, later": JoinReply(code=Code.BAD_EXPIRATION_TIME, expiration=float(MOST)),
    "the group has started, without members": JoinReply(code=Code.GROUP_STARTS),
}


@pytest.mark.parametrize("lie", LIES)
@in_virtual_time
async def test_lying_leader_does_not_stop_others_from_averaging(lie):
    swarm = Swarm()
    tensors = [torch.full([8], float(i)) for i in range(2)]
    honest = [await swarm.add([tensor]) for tensor in tensors]
    liar = await swarm.add([torch.full([8], 100.0)])
    asked = []

    async def answer(call, request, remote):
        asked.append(remote)
        yourself = JoinReply(code=Code.NOT_A_LEADER, expiration=2e9, better_leader=PeerAddresses(remote.to_bytes()))
        await call.send(LIES[lie] or yourself)
        await call.receive(JoinRequest)  # never comes: it waits until the other ends the call

    matchmaking = liar.lanes[""].matchmaking
    matchmaking.answer_join = answer
    # It promises to start before all others, so that they come to it first.
    keys = liar.lanes[""].keys
    await keys.declare_averager(keys.current_key, liar.p2p.peer_id, get_dht_time() + 1.0)
    await asyncio.gather(*[node.run_step(make_control(node, timeout=60.0)) for node in honest])
    assert asked
    assert all(torch.equal(tensor, torch.full([8], 0.5)) for tensor in tensors)
    await swarm.close()


async def look_for_ever(liar):
    """Promise to start before all others, again and again."""
    keys = liar.lanes[""].keys
    while True:
        await keys.declare_averager(keys.current_key, liar.p2p.peer_id, get_dht_time() + 1.0)
        await asyncio.sleep(0.5)


@in_virtual_time
async def test_leader_outside_its_own_group_is_not_followed():
    swarm = Swarm()
    tensors = [torch.full([8], float(i)) for i in range(2)]
    honest = [await swarm.add([tensor]) for tensor in tensors]
    liar = await swarm.add([torch.full([8], 100.0)])

    async def answer(call, request, remote):
        members = [Member(PeerAddresses(remote.to_bytes()), 0, 8), Member(PeerAddresses(b"nobody"), 0, 0)]
        await call.send(JoinReply(code=Code.GROUP_STARTS, group=GroupStart(bytes(20), members)), end=True)

    liar.lanes[""].matchmaking.answer_join = answer
    looking = asyncio.ensure_future(look_for_ever(liar))
    controls = [make_control(node, timeout=3.0, allow_retries=False) for node in honest]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(honest, controls, strict=True)])
    assert [len(control.result()) for control in controls] == [2, 2]
    assert [node.p2p.metrics.members_untrue for node in honest] == [1, 1]
    await cancel_and_wait(looking)
    await swarm.close()


@pytest.mark.parametrize("code", [Code.BAD_EXPIRATION_TIME, Code.NOT_A_LEADER])
@in_virtual_time
async def test_two_who_have_something_new_to_say_each_time_are_not_asked_for_ever(code):
    """They always seem to start a little earlier than those who ask them, or to follow each other."""
    swarm = Swarm(delay=0.05)
    honest = [await swarm.add([torch.full([8], float(i))]) for i in range(3)]
    liars = [await swarm.add([torch.full([8], 100.0)]) for _ in range(2)]

    def answer_for(other):
        async def answer(call, request, remote):
            soon = min(get_dht_time() + 0.3, request.expiration - 0.01)
            named = record_of(other.p2p, other.p2p.peer_id) if code == Code.NOT_A_LEADER else None
            await call.send(JoinReply(code=code, expiration=soon, better_leader=named), end=True)

        return answer

    for liar, other in (liars, liars[::-1]):
        liar.lanes[""].matchmaking.answer_join = answer_for(other)
    looking = [asyncio.ensure_future(look_for_ever(liar)) for liar in liars]
    controls = [make_control(node, timeout=3.0, expected_group_size=3, allow_retries=False) for node in honest]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(honest, controls, strict=True)])
    assert [len(control.result()) for control in controls] == [3, 3, 3]
    await cancel_and_wait(*looking)
    await swarm.close()


@alone_in_virtual_time
async def test_an_answer_that_makes_no_sense_is_an_error_of_the_protocol():
    swarm = Swarm()
    node = await swarm.add([torch.zeros(4)])
    with pytest.raises(ProtocolError, match="is malformed"):
        learn(node.p2p, PeerAddresses(b"nobody", ["/ip4/1.2.3.4/tcp/99999"]))
    await swarm.close()


def test_a_refusal_tells_only_what_was_asked():
    own = {"prefix": "run", "optimizer": "a secret of this run"}
    assert difference_of(own, {}) == "there are settings there that this peer does not have: is its shoal older?"
    assert difference_of(own, {"prefix": "other"}).startswith("prefix is 'run' there and 'other' here")
    assert "secret" not in difference_of(own, {"prefix": "other", "unknown": "1"})
    assert "more than there are" in difference_of(own, {str(i): "" for i in range(MAX_SETTINGS + 1)})
    assert difference_of(own, dict(own)) == ""


@alone_in_virtual_time
async def test_more_to_gather_than_fits_is_refused_before_anything_is_sent():
    dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    averager = DecentralizedAverager([torch.zeros(4)], dht, prefix="run", start=True)
    with pytest.raises(ValueError, match=r"at most 65536 bytes, this has 65541.*into the DHT"):
        averager.step(gather=bytes(MAX_GATHERED_BYTES), wait=False)
    averager.shutdown()
    dht.shutdown()
