"""The option ``verify_reducers``: who can use it, and that honest members notice nothing of it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging import DecentralizedAverager
from shoal.averaging.control import AveragingMode
from shoal.averaging.messages import RoundKind, RoundMessage
from shoal.averaging.round import traffic
from shoal.averaging.round.parts import RoundVector
from shoal.averaging.round.verification import Verification
from shoal.compression import CompressionInfo, Float16Compression, NoCompression, SizeAdaptiveCompression
from shoal.dht import DHT
from shoal.errors import AllreduceException, ProtocolError
from shoal.p2p import Identity
from tests.averaging.swarm import Swarm, make_control
from tests.device import on_cpu_only

pytestmark = on_cpu_only  # all values are in host memory here

NODE, CLIENT, AUX = AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX
SIZE = 6000


async def start(modes, tensors, **settings):
    swarm = Swarm()
    for each, mode in zip(tensors, modes, strict=True):
        await swarm.add(each, mode=mode, verify_reducers=True, part_size_bytes=4000, **settings)
    return swarm


async def average(swarm, **options):
    controls = [make_control(node, expected_group_size=len(swarm.nodes), **options) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(each) for node, each in zip(swarm.nodes, controls, strict=True)])
    return controls


@pytest.mark.parametrize("stripes", [1, 3])
@pytest.mark.parametrize("modes", [(NODE,) * 4, (CLIENT, NODE, AUX, CLIENT), (NODE, CLIENT, CLIENT, CLIENT)], ids=str)
async def test_members_of_all_kinds_get_the_mean_and_nobody_is_blamed(monkeypatch, modes, stripes):
    monkeypatch.setattr(traffic, "stripes_for", lambda round_trip, parts: min(stripes, parts))
    tensors = [[torch.full((SIZE,), float(i)), torch.arange(9) + i, torch.empty(0)] for i in range(4)]
    swarm = await start(modes, tensors, **({"target_group_size": 4} if AUX in modes else {}))
    controls = await average(swarm)
    senders = [i for i, mode in enumerate(modes) if mode is not AUX]
    mean = sum(senders) / len(senders)
    for index in senders:
        assert torch.equal(tensors[index][0], tensors[senders[0]][0])
        torch.testing.assert_close(tensors[index][0], torch.full((SIZE,), mean))
    for control in controls:
        assert not control.round.failed_peers
        assert control.round.share_averaged == 1
    assert not sum(node.p2p.metrics.members_untrue for node in swarm.nodes)
    await swarm.close()


async def test_a_member_with_bad_values_is_no_liar():
    tensors = [[torch.full((SIZE,), float(i))] for i in range(3)]
    tensors[0][0][5] = torch.nan
    swarm = await start([NODE] * 3, tensors)
    controls = await average(swarm)
    assert all(torch.equal(tensor, torch.full((SIZE,), 1.5)) for [tensor] in tensors)
    assert not any(control.round.failed_peers for control in controls)
    await swarm.close()


async def test_peers_with_and_without_it_do_not_meet():
    swarm = Swarm()
    for verify in (False, True):
        await swarm.add([torch.zeros(4)], verify_reducers=verify, min_matchmaking_time=0.5, request_timeout=0.3)
    errors = [control.exception() for control in await average(swarm, timeout=2.0)]
    assert all(isinstance(error, AllreduceException) for error in errors)
    assert "verify_reducers is not known there" in str(errors)
    await swarm.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": Float16Compression()}, "lossy"),
        ({"compression": SizeAdaptiveCompression(100, NoCompression(), Float16Compression())}, "lossy"),
        ({"averaging_alpha": 0.5}, "averaging_alpha=0.5"),
        ({"quorum": 2}, "quorum=2"),
    ],
    ids=["codec", "codec of large tensors", "alpha", "quorum"],
)
def test_what_it_does_not_go_with_is_refused_at_once(options, reason):
    dht = DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    with pytest.raises(ValueError, match=f"verify_reducers=True .*{reason}"):
        DecentralizedAverager([torch.zeros(200)], dht, prefix="run", start=True, verify_reducers=True, **options)
    averager = DecentralizedAverager([torch.zeros(200)], dht, prefix="run", start=True, verify_reducers=True)
    averager.shutdown()
    dht.shutdown()


# --- proofs -----------------------------------------------------------------------------------------------------------


def verification(round_id=b"round"):
    tensor = torch.zeros(20)
    vector = RoundVector([tensor], [CompressionInfo.from_tensor(tensor)], NoCompression(), 40, [10, 10], 1.0)
    return Verification(round_id, [i.peer_id for i in IDENTITIES], 0, vector, IDENTITIES[0].sign)


IDENTITIES = [Identity.generate() for _ in range(2)]
ONE, OTHER = b"1" * 32, b"2" * 32


def proof(hashes=(ONE, OTHER), signer=1, members=(1,), round_id=b"round") -> RoundMessage:
    made = verification(round_id)
    signatures = [IDENTITIES[signer].sign(made.statement(1, each)) for each in hashes]
    return RoundMessage(RoundKind.VOID, members=list(members), hashes=list(hashes), signatures=signatures)


def test_two_signed_hashes_are_a_proof():
    assert verification().check_proof(proof()) == 1


@pytest.mark.parametrize(
    "false",
    [
        proof(hashes=(ONE, ONE)),
        proof(hashes=(ONE,)),
        proof(signer=0),
        proof(members=(0,)),
        proof(members=()),
        proof(members=(7,)),
        proof(round_id=b"another"),
        RoundMessage(RoundKind.VOID, members=[1], hashes=[ONE, OTHER]),
    ],
    ids=["the same", "one", "of another", "against another", "nobody", "no member", "another round", "unsigned"],
)
def test_what_proves_nothing(false):
    with pytest.raises(ProtocolError, match="without a proof"):
        verification().check_proof(false)


@pytest.mark.parametrize("report", [{}, {"hashes": [ONE] * 2}, {"hashes": [ONE] * 3, "signatures": [b""] * 3}])
def test_a_malformed_report_is_refused(report):
    with pytest.raises(ProtocolError, match="malformed"):
        verification().take_report(1, RoundMessage(RoundKind.REPORT, **report))


def test_a_commit_without_the_seal_of_a_member_is_refused():
    made = verification()
    for seals in ([], [b"", b""], [b"", IDENTITIES[0].sign(made.summary(made.hashes()))]):
        with pytest.raises(ProtocolError, match="does not show"):
            made.check_seals(seals, [1])
    made.check_seals([b"", IDENTITIES[1].sign(made.summary(made.hashes()))], [1])
