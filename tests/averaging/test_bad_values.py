"""Rounds in which some members have values that are NaN, infinite or huge."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.averaging.control import AveragingMode
from shoal.averaging.groups.memory import SEEN_SEARCHES
from shoal.averaging.messages import PartStatus
from shoal.averaging.node import average_once
from shoal.averaging.round.reducer import PartReducer
from shoal.compression import CompressionInfo, Float16Compression, NoCompression, Uniform8BitQuantization
from tests.averaging.swarm import Swarm, make_control, warnings_of
from tests.compression.codecs import ALL, name_of
from tests.device import on_cpu_only
from tests.dht.virtual_time import alone_in_virtual_time

pytestmark = on_cpu_only  # all values are in host memory here

NODE, CLIENT, AUX = AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX
SIZE = 6000


def make_tensors(number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(SIZE, generator=generator)
    return [[(common + 0.1 * torch.randn(SIZE, generator=generator)).to(dtype)] for _ in range(number)]


async def run_round(swarm, *, nodes=None, weights=None, expected=None, timeout=20.0):
    nodes = nodes or swarm.nodes
    controls = [
        make_control(node, timeout=timeout, expected_group_size=expected or len(nodes), weight=weight)
        for node, weight in zip(nodes, weights or [1.0] * len(nodes), strict=True)
    ]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(nodes, controls, strict=True)])
    return controls


async def start(tensors, **settings):
    swarm = Swarm()
    averages = settings.pop("averages", [average_once] * len(tensors))
    modes = settings.pop("modes", [NODE] * len(tensors))
    for each, average, mode in zip(tensors, averages, modes, strict=True):
        await swarm.add(each, average=average, mode=mode, **{"part_size_bytes": 4000, **settings})
    return swarm


async def send_unchecked(session, tensors, infos):
    """What a member does that does not look at its values, like one of an older version."""

    async def believe(*_):
        return True

    session.check_values = believe
    await session.all_reduce(tensors, infos)


# --- a member that knows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@alone_in_virtual_time
async def test_the_others_get_their_own_mean_and_so_does_the_bad_one(codec, bad, caplog):
    tensors = make_tensors(4)
    mean = sum(each[0].double() for each in tensors[1:]) / 3
    tensors[0][0][7] = bad
    swarm = await start(tensors, compression=codec)
    controls = await run_round(swarm)
    limit = 1e-6 if isinstance(codec, NoCompression) else 0.4
    for (tensor,), control in zip(tensors, controls, strict=True):
        error = (tensor.double() - mean).square().mean().sqrt()
        assert error <= limit
        result = control.round
        weights = dict(zip(result.peers, result.weights, strict=True))
        assert [weights[node.p2p.peer_id] for node in swarm.nodes] == [0, 1, 1, 1]
        assert result.share_averaged == 1
        assert not result.failed_peers
        assert not result.not_finite_peers
    if isinstance(codec, NoCompression):
        assert all(torch.equal(tensor, tensors[1][0]) for (tensor,) in tensors)
    [warning] = warnings_of(caplog, "weight 0")
    assert "1 of the 6000 values of tensor 0 (shape (6000,))" in warning
    await swarm.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@alone_in_virtual_time
async def test_tensors_of_all_types_beside_empty_and_whole_ones(dtype):
    tensors = [[torch.full((500,), 4.0 + 2 * i).to(dtype), torch.empty(0), torch.arange(9) + 2 * i] for i in range(3)]
    tensors[0][0][499] = torch.nan
    swarm = await start(tensors)
    await run_round(swarm)
    for values, empty, whole in tensors:
        assert torch.equal(values, torch.full((500,), 7.0).to(dtype))
        assert torch.equal(whole, torch.arange(9) + 3)
        assert not empty.numel()
    await swarm.close()


@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()], ids=name_of)
@alone_in_virtual_time
async def test_the_warning_comes_once_until_the_values_are_sound_again(codec, caplog):
    tensors = make_tensors(2)
    swarm = await start(tensors, compression=codec)
    for count, is_bad in [(1, True), (1, True), (1, False), (2, True)]:
        if is_bad:
            tensors[0][0][0] = torch.nan
        await run_round(swarm)
        assert len(warnings_of(caplog, "weight 0")) == count
    await swarm.close()


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@alone_in_virtual_time
async def test_with_small_alpha_bad_values_become_the_average(alpha):
    tensors = [[torch.full((SIZE,), float(i))] for i in range(3)]
    tensors[0][0][5] = torch.nan
    swarm = await start(tensors, averaging_alpha=alpha)
    await run_round(swarm)
    assert tensors[0][0][5] == 1.5
    assert torch.equal(tensors[0][0][SIZE // 2 :], torch.full((SIZE // 2,), 1.5 * alpha))  # other parts
    torch.testing.assert_close(tensors[1][0], torch.full((SIZE,), 1 + 0.5 * alpha))
    await swarm.close()


@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression(), Uniform8BitQuantization()], ids=name_of)
@alone_in_virtual_time
async def test_if_all_are_bad_there_is_no_average_and_nothing_changes(codec):
    tensors = make_tensors(3)
    for each in tensors:
        each[0][3] = torch.inf
    before = [each[0].clone() for each in tensors]
    swarm = await start(tensors, compression=codec)
    for control in await run_round(swarm):
        assert len(control.result()) == 3
        assert control.round.weights == (0, 0, 0)
        assert control.round.share_averaged == 0
    for (tensor,), old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
    await swarm.close()


@alone_in_virtual_time
async def test_clients_and_auxiliaries():
    tensors = [[torch.full((SIZE,), float(i))] for i in range(4)]
    tensors[0][0][0] = torch.nan
    swarm = await start(tensors, modes=[CLIENT, NODE, AUX, CLIENT], target_group_size=4)
    await run_round(swarm, weights=[1.0, 1.0, 0.0, 1.0])
    for index in (0, 1, 3):
        assert torch.equal(tensors[index][0], torch.full((SIZE,), 2.0))
    assert torch.equal(tensors[2][0], torch.full((SIZE,), 2.0))  # as it was
    await swarm.close()


@pytest.mark.parametrize("are_all_bad", [False, True])
@pytest.mark.parametrize("late", [0, 1, 2, 3])
@alone_in_virtual_time
async def test_late_member_with_bad_values_gets_the_result(late, are_all_bad):
    tensors = [[torch.full((SIZE,), float(i))] for i in range(4)]
    for index in range(4) if are_all_bad else [late]:
        tensors[index][0][7] = torch.nan
    swarm = await start(tensors, quorum=3, quorum_grace=0.1)
    controls = [make_control(node, expected_group_size=4, triggered=i != late) for i, node in enumerate(swarm.nodes)]
    running = [asyncio.ensure_future(node.run_step(c)) for node, c in zip(swarm.nodes, controls, strict=True)]
    await asyncio.gather(*running[:late], *running[late + 1 :])
    controls[late].allow_allreduce()
    await running[late]
    mean = sum(i for i in range(4) if i != late) / 3
    for i, ((tensor,), control) in enumerate(zip(tensors, controls, strict=True)):
        assert len(control.result()) == 4
        assert control.round.share_averaged == (0 if are_all_bad else 1)
        own = torch.full((SIZE,), float(i))
        own[7] = torch.nan
        torch.testing.assert_close(tensor, own if are_all_bad else torch.full((SIZE,), mean), equal_nan=True)
    await swarm.close()


# --- a member that does not know --------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@alone_in_virtual_time
async def test_what_arrives_bad_is_left_out_and_its_sender_is_named(codec, caplog):
    """Some codecs turn bad values into 0: then they count as such."""
    tensors = make_tensors(4)
    tensors[0][0].fill_(torch.nan)
    info = CompressionInfo.from_tensor(tensors[0][0])
    decoded = [codec.extract(codec.compress(tensor, info)).double() for (tensor,) in tensors]
    counted = [values for values in decoded if not values.isnan().any()]
    swarm = await start(
        tensors, compression=codec, averages=[send_unchecked, *[average_once] * 3], modes=[CLIENT, NODE, NODE, NODE]
    )
    controls = await run_round(swarm)
    bad = swarm.nodes[0].p2p.peer_id
    expected = () if len(counted) == 4 else (bad,)
    for (tensor,), control in zip(tensors[1:], controls[1:], strict=True):
        error = (tensor - sum(counted) / len(counted)).square().mean().sqrt()
        assert error <= (1e-6 if isinstance(codec, NoCompression) else 0.3)
        assert control.round.not_finite_peers == expected
        assert control.round.share_averaged == 1
        assert not control.round.failed_peers
    assert len(warnings_of(caplog, f"{bad} sent NaN or infinite values")) == 3 * len(expected)
    troubles = [node.p2p.metrics.troubles["values that are not finite"] for node in swarm.nodes]
    assert sum(troubles) == 3 * len(expected)
    await swarm.close()


@alone_in_virtual_time
async def test_bad_values_of_weight_zero_are_nobody_s_concern(caplog):
    tensors = make_tensors(3)
    mean = (tensors[1][0] + tensors[2][0]) / 2
    tensors[0][0].fill_(torch.nan)
    for codec in (NoCompression(), Float16Compression()):
        swarm = await start(tensors, compression=codec, averages=[send_unchecked, average_once, average_once])
        controls = await run_round(swarm, weights=[0.0, 1.0, 1.0])
        for (tensor,), control in zip(tensors, controls, strict=True):
            torch.testing.assert_close(tensor, mean, atol=2e-3, rtol=0)
            assert not control.round.not_finite_peers
        await swarm.close()
    assert not warnings_of(caplog, "")


@alone_in_virtual_time
async def test_sender_of_bad_values_is_refused_temporarily(monkeypatch):
    monkeypatch.setattr("shoal.averaging.groups.memory.SEEN_SEARCHES", 2)
    tensors = make_tensors(4)
    swarm = await start(
        tensors,
        averages=[send_unchecked, *[average_once] * 3],
        modes=[CLIENT, NODE, NODE, NODE],
        min_matchmaking_time=15.0,  # nobody may wait that long for who is not let in
    )
    bad, honest = swarm.nodes[0], swarm.nodes[1:]
    tensors[0][0].fill_(torch.nan)
    await run_round(swarm)
    tensors[0][0].zero_()  # it is sound again
    lonely = make_control(bad, timeout=60.0, allow_retries=False)
    trying = asyncio.ensure_future(bad.run_step(lonely))
    for _ in range(2):
        for control in await run_round(swarm, nodes=honest, expected=4):
            assert set(control.result()) == {node.p2p.peer_id for node in honest}
    assert "NaN or infinite" in bad.lanes[""].matchmaking.explain_failure()
    controls = await run_round(swarm, nodes=honest, expected=4)
    await trying
    for control in [lonely, *controls]:
        assert len(control.result()) == 4
    await swarm.close()


@alone_in_virtual_time
async def test_witness_reports_bad_values_through_the_coordinator():
    """They take it for true for one round: what a single peer says may be a lie."""
    tensors = make_tensors(4)
    tensors[0][0][-1] = torch.nan
    swarm = await start(tensors, averages=[send_unchecked, *[average_once] * 3], modes=[CLIENT, NODE, NODE, NODE])
    bad = swarm.nodes[0].p2p.peer_id
    controls = await run_round(swarm)
    assert all(control.round.not_finite_peers == (bad,) for control in controls[1:])
    seen = [node for node in swarm.nodes[1:] if node.lanes[""].matchmaking.refusals[bad].searches == SEEN_SEARCHES]
    assert len(seen) == 1
    searches = [node.lanes[""].matchmaking.refusals.next_search for node in swarm.nodes[1:]]
    assert all(bad in search() for search in searches)
    assert sum(bad in search() for search in searches) == 1
    await swarm.close()


# --- huge weights and values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(2.0**53,) * 3, (1e-320, 1e-320, 1e-320), (1e15, 1e15, 1e15)])
@alone_in_virtual_time
async def test_equal_weights_of_any_size_give_the_same_bits(weights):
    results = []
    for each in (weights, (1.0, 1.0, 1.0)):
        tensors = make_tensors(3)
        swarm = await start(tensors)
        await run_round(swarm, weights=each)
        assert all(torch.equal(tensor, tensors[0][0]) for (tensor,) in tensors)
        results.append(tensors[0][0])
        await swarm.close()
    assert torch.equal(*results)


@alone_in_virtual_time
async def test_a_tiny_weight_beside_a_huge_one_counts_nothing():
    tensors = make_tensors(3)
    mean = (tensors[0][0] + tensors[2][0]) / 2
    swarm = await start(tensors)
    await run_round(swarm, weights=(1e15, 1e-38, 1e15))
    for (tensor,) in tensors:
        torch.testing.assert_close(tensor, mean)
    await swarm.close()


@pytest.mark.parametrize("codec", ALL, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@alone_in_virtual_time
async def test_the_mean_of_huge_values_is_finite(codec, dtype, alpha):
    largest = torch.finfo(dtype).max
    tensors = [[torch.full((200,), largest, dtype=dtype)] for _ in range(3)]
    tensors[0][0][::2] *= -1
    tensors[1][0][:9] = 0.5
    swarm = await start(tensors, compression=codec, averaging_alpha=alpha)
    for control in await run_round(swarm, weights=(1.0, 1.0, 1.0)):
        assert control.round.share_averaged == 1
        assert not control.round.not_finite_peers
    assert all(bool(tensor.isfinite().all()) for (tensor,) in tensors)
    await swarm.close()


@alone_in_virtual_time
async def test_a_difference_is_refused_where_there_can_be_none(monkeypatch):
    """Of whole numbers averages travel as they are: a reducer that says otherwise has failed, and no more."""
    tensors = [[torch.full((SIZE,), 10 * i)] for i in range(2)]
    swarm = await start(tensors)

    async def spoilt_reply(self, index, sender, reply=PartReducer.reply):
        encoded, _ = await reply(self, index, sender)
        return encoded, PartStatus.DELTA

    monkeypatch.setattr(PartReducer, "reply", spoilt_reply)
    for control, (tensor,) in zip(await run_round(swarm), tensors, strict=True):
        assert len(control.round.failed_peers) == 1
        assert control.round.share_averaged == 1  # what the other one holds has been passed on as it is
        assert tensor.unique().tolist() == [5]
    await swarm.close()
