"""Rounds by other rules than the mean: what all of them get, and members that lie about their norms."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
import torch

from shoal.averaging import Aggregation, CenteredClip, ClipToMedianNorm, TrimmedMean
from shoal.averaging.control import AveragingMode, GroupInfo
from shoal.averaging.messages import STATEMENT_BYTES, BeginReduce, RoundAlive
from shoal.averaging.round import session as session_module
from shoal.averaging.round.combining import NormBook, NormClaim, norm_of, share_norms
from shoal.averaging.round.exchange import Delivery
from shoal.compression import BlockwiseQuantization, Float16Compression, Uniform8BitQuantization
from shoal.errors import AllreduceException, ProtocolError
from shoal.net.transport import decode_header
from shoal.p2p import Identity
from tests.averaging.swarm import Swarm, make_control, until, warnings_of
from tests.compression.codecs import name_of
from tests.device import on_cpu_only
from tests.dht.virtual_time import alone_in_virtual_time, in_virtual_time

pytestmark = [pytest.mark.once, on_cpu_only]  # all values are in host memory here

NODE, CLIENT, AUX = AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX
SHAPES = [(60, 50), (7,), (), (0, 5)]
LIAR = 0


class Largest(Aggregation):
    """A user's own."""

    def combine(self, values, weights, share):
        return values.max(0).values


class Unweighted(Aggregation):
    """Of norms, a user's own: all vectors get the length 1."""

    needs_norms = True

    def factors(self, norms, weights):
        return [1 / norm for norm in norms]

    def combine(self, values, weights, share):
        return values.mean(0)


RULES = [ClipToMedianNorm(), TrimmedMean(0.3), CenteredClip(100.0), Largest(), Unweighted()]


def make_tensors(number, liars=()):
    """The same and some noise; liars have 100 times as much of the opposite."""
    generator = torch.Generator().manual_seed(0)
    common = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [
        [
            (t + torch.randn(t.shape, generator=generator) * (0.1 + 0.02 * i)) * (-100 if i in liars else 1)
            for t in common
        ]
        for i in range(number)
    ]


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def expect(rule, vectors, weights):
    """The rule on whole vectors, if it does not matter how they are cut."""
    kept = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if weight > 0]
    rows, counts = [vector for vector, _ in kept], [weight for _, weight in kept]
    return rule.aggregate(rows, counts, rule.factors([float(row.double().norm()) for row in rows], counts), 1.0)


async def start(tensors, *, rule, modes=None, seed=0, **settings):
    swarm = Swarm(seed)
    for each, mode in zip(tensors, modes or [NODE] * len(tensors), strict=True):
        await swarm.add(each, mode=mode, aggregation=rule, **{"part_size_bytes": 2000, **settings})
    return swarm


async def run_round(swarm, *, nodes=None, weights=None, **options):
    nodes = nodes or swarm.nodes
    controls = [
        make_control(node, expected_group_size=len(nodes), weight=weight, **options)
        for node, weight in zip(nodes, weights or [1.0] * len(nodes), strict=True)
    ]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(nodes, controls, strict=True)])
    return controls


# --- what all get -----------------------------------------------------------------------------------------------------

CASES = {
    "five": ([NODE] * 5, [1.0] * 5, {}),
    "weights": ([NODE] * 5, [0.5, 2.0, 3.0, 0.0, 1.0], {}),
    "three": ([NODE] * 3, [1.0, 2.0, 1.0], {}),
    "two": ([NODE] * 2, [1.0, 2.0], {}),
    "one part each": ([NODE] * 5, [1.0] * 5, {"part_size_bytes": 2**19}),
}


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("case", CASES)
@alone_in_virtual_time
async def test_all_get_what_the_rule_makes_of_whole_vectors(rule, case):
    modes, weights, settings = CASES[case]
    tensors = make_tensors(len(modes), liars=(LIAR,))
    before = [flat(each) for each in tensors]
    swarm = await start(tensors, rule=rule, modes=modes, **settings)
    for control in await run_round(swarm, weights=weights):
        assert control.round.share_averaged == 1
        assert not control.round.failed_peers
    assert all(torch.equal(flat(each), flat(tensors[0])) for each in tensors), "to the last bit"
    if not isinstance(rule, CenteredClip):
        torch.testing.assert_close(flat(tensors[0]), expect(rule, before, weights))
    elif len(modes) == 5:  # its radius is cut into parts; the liar pulls by no more than it, in 20 steps
        honest = expect(TrimmedMean(0.0), before[1:], weights[1:])
        assert (flat(tensors[0]) - honest).norm() < rule.tau
    await swarm.close()


@pytest.mark.parametrize("rule", [ClipToMedianNorm(), CenteredClip(1.0)], ids=repr)
@pytest.mark.parametrize("number", [4, 5])
@alone_in_virtual_time
async def test_among_five_nobody_can_decide_by_claiming_many_samples(rule, number):
    tensors = make_tensors(number)
    before = [flat(each) for each in tensors]
    swarm = await start(tensors, rule=rule)
    controls = await run_round(swarm, weights=[2.0**40, *[1.0] * (number - 1)])
    assert controls[1].round.weights[0] == 2.0**40, "what it claims is known"
    limited = [2.0 if number == 5 else 2.0**40, *[1.0] * (number - 1)]
    if not isinstance(rule, CenteredClip):
        torch.testing.assert_close(flat(tensors[1]), expect(rule, before, limited))
    if number == 5:
        away = (before[0] - before[1]).norm()
        assert (flat(tensors[1]) - before[0]).norm() > away / 3
    await swarm.close()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@alone_in_virtual_time
async def test_clients_and_auxiliaries(rule):
    modes = [NODE, CLIENT, AUX, NODE, CLIENT]
    tensors = make_tensors(5)
    before = [flat(each) for each in tensors]
    swarm = await start(tensors, rule=rule, modes=modes)
    controls = [
        make_control(node, weight=0.0) if mode is AUX else make_control(node, expected_group_size=4)
        for node, mode in zip(swarm.nodes, modes, strict=True)
    ]
    await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
    senders = [0, 1, 3, 4]
    assert all(torch.equal(flat(tensors[i]), flat(tensors[0])) for i in senders)
    if not isinstance(rule, CenteredClip):
        torch.testing.assert_close(flat(tensors[0]), expect(rule, [before[i] for i in senders], [1.0] * 4))
    await swarm.close()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "codec", [Float16Compression(), Uniform8BitQuantization(), BlockwiseQuantization()], ids=name_of
)
@alone_in_virtual_time
async def test_codecs_change_little_and_accuse_nobody(rule, codec, caplog):
    tensors = make_tensors(5)
    tensors[1][0].mul_(3)
    before = [flat(each) for each in tensors]
    swarm = await start(tensors, rule=rule, compression=codec)
    await run_round(swarm)
    if isinstance(rule, (ClipToMedianNorm, TrimmedMean)):
        expected = expect(rule, before, [1.0] * 5)
        error = (flat(tensors[2]) - expected).norm() / expected.norm()
        assert error < 0.1
    assert warnings_of(caplog, "") == []
    assert not any(node.p2p.metrics.members_untrue for node in swarm.nodes)
    await swarm.close()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@alone_in_virtual_time
async def test_member_with_bad_values_has_no_weight(rule, caplog):
    tensors = make_tensors(5)
    before = [flat(each) for each in tensors]
    tensors[2][0][3, 3] = torch.nan
    swarm = await start(tensors, rule=rule)
    await run_round(swarm)
    sound = [vector for i, vector in enumerate(before) if i != 2]
    if not isinstance(rule, CenteredClip):
        torch.testing.assert_close(flat(tensors[2]), expect(rule, sound, [1.0] * 4))
    assert all(torch.equal(flat(each), flat(tensors[2])) for each in tensors)
    assert len(warnings_of(caplog, "weight 0")) == 1
    await swarm.close()


@pytest.mark.parametrize("rule", [ClipToMedianNorm(), TrimmedMean(0.3)], ids=repr)
@alone_in_virtual_time
async def test_bad_values_are_named_although_rules_hide_them(rule, caplog):
    async def send_unchecked(session, tensors, infos):
        async def believe(*_):
            return True

        session.check_values = believe
        await session.all_reduce(tensors, infos)

    tensors = make_tensors(5)
    tensors[LIAR][0].fill_(torch.inf)
    swarm = await start(tensors, rule=rule)
    swarm.nodes[LIAR].average = send_unchecked
    controls = await run_round(swarm)
    liar = swarm.nodes[LIAR].p2p.peer_id
    assert all(control.round.not_finite_peers == (liar,) for control in controls[1:])
    assert all(bool(flat(each).isfinite().all()) for each in tensors[1:])
    await swarm.close()


@alone_in_virtual_time
async def test_several_phases_each_have_their_own_norms():
    """As PowerSGD: what is long in the first phase may be short in the second one."""
    tensors = make_tensors(3)
    results = []

    async def average(session, tensors, infos):
        place = [node.p2p.peer_id for node in swarm.nodes].index(session.group.peer_ids[session.own_index])
        for phase in range(2):
            values = torch.full((4000,), 8.0 if place == phase else 1.0 + place / 10)
            await session.all_reduce([values])
            results.append((phase, place, values[0].item(), bool((values == values[0]).all())))

    swarm = await start(tensors, rule=ClipToMedianNorm())
    for node in swarm.nodes:
        node.average = average
    await run_round(swarm)
    expected = {0: (1.2 + 1.1 + 1.2) / 3, 1: (1.0 + 1.2 + 1.2) / 3}
    assert len(results) == 6
    for phase, _, value, is_uniform in results:
        assert is_uniform
        assert value == pytest.approx(expected[phase])
    await swarm.close()


@alone_in_virtual_time
async def test_a_rule_that_fails_fails_the_round_and_says_why():
    class Broken(Aggregation):
        def combine(self, values, weights, share):
            raise ArithmeticError("the user's own mistake")

    tensors = make_tensors(3)
    before = [flat(each) for each in tensors]
    swarm = await start(tensors, rule=Broken())
    controls = [make_control(n, expected_group_size=3, timeout=3.0, allow_retries=False) for n in swarm.nodes]
    await asyncio.gather(*[n.run_step(c) for n, c in zip(swarm.nodes, controls, strict=True)])
    for control in controls:
        assert isinstance(control.exception(), AllreduceException)
    assert any("the user's own mistake" in str(control.exception()) for control in controls)
    assert all(torch.equal(flat(each), old) for each, old in zip(tensors, before, strict=True))
    await swarm.close()


@alone_in_virtual_time
async def test_peers_with_different_rules_refuse_each_other_and_say_why():
    swarm = Swarm()
    for rule in (None, TrimmedMean(0.2)):
        await swarm.add([torch.zeros(3)], aggregation=rule, min_matchmaking_time=0.5)
    controls = [make_control(node, timeout=1.0) for node in swarm.nodes]
    await asyncio.gather(*[node.run_step(c) for node, c in zip(swarm.nodes, controls, strict=True)])
    mean, trimmed = "'mean'", "'TrimmedMean(fraction=0.2)'"
    texts = [str(control.exception()) for control in controls]
    expected = [f"aggregation is {one} there and {other} here" for one, other in ((mean, trimmed), (trimmed, mean))]
    assert any(text in each for each in texts for text in expected), texts
    await swarm.close()


# --- the mean pays nothing for this -----------------------------------------------------------------------------------


@alone_in_virtual_time
async def test_the_mean_sends_nothing_of_it(monkeypatch):
    seen = []
    monkeypatch.setattr(session_module, "share_norms", lambda *_: seen.append("norms were computed"))
    begin = Delivery.run_stripe

    async def look(self, message):
        seen.extend([message.norms, message.statement])
        await begin(self, message)

    monkeypatch.setattr(Delivery, "run_stripe", look)
    swarm = await start(make_tensors(3), rule=None)
    await run_round(swarm)
    assert seen == [[], b""] * 6
    await swarm.close()


# --- lies about norms -------------------------------------------------------------------------------------------------


def is_of(tensors, vector):
    """Whether a vector is made of these tensors."""
    return vector.flat[0].data_ptr() == tensors[0].data_ptr()


# It reduces nothing itself, and never coordinates.
LIAR_CALLS_ONLY = [CLIENT, *[NODE] * 4]


@pytest.mark.parametrize("factor", [0.01, 0.9])
@alone_in_virtual_time
async def test_sending_more_than_announced_is_ignored_and_named(monkeypatch, caplog, factor):
    tensors = make_tensors(5, liars=(LIAR,))
    before = [flat(each) for each in tensors]

    def understate(vector, own_index):
        norms = share_norms(vector, own_index)
        return [factor * norm for norm in norms] if is_of(tensors[LIAR], vector) else norms

    monkeypatch.setattr(session_module, "share_norms", understate)
    swarm = await start(tensors, rule=ClipToMedianNorm(), modes=LIAR_CALLS_ONLY, part_size_bytes=400)
    await run_round(swarm)
    liar, honest = swarm.nodes[LIAR], swarm.nodes[1:]
    assert all(torch.equal(flat(each), flat(tensors[1])) for each in tensors)
    told = before[LIAR] * min(1.0, factor)
    median = sorted(float(vector.norm()) for vector in [told, *before[1:]])[2]
    pull = before[LIAR] * min(1.0, median / float(told.norm()))
    without = sum(vector * min(1.0, median / float(vector.norm())) for vector in before[1:]) / 4
    with_it = (4 * without + pull) / 5
    result = flat(tensors[1])
    is_without = torch.isclose(result, without, rtol=1e-4, atol=1e-5)
    assert bool((is_without | torch.isclose(result, with_it, rtol=1e-4, atol=1e-5)).all())
    # No more of it counts than it has told; of a whole share that is 0.9 ** 2 of the squares.
    counted = float(before[LIAR][~is_without].norm()) / float(before[LIAR].norm())
    assert counted <= 1.01 * factor
    assert counted > 0.5 * factor or factor < 0.5
    warnings = warnings_of(caplog, "has sent values with a norm of at least")
    assert len(warnings) == 4
    assert all(str(liar.p2p.peer_id) in text and "announced" in text for text in warnings)
    assert [node.p2p.metrics.members_untrue for node in swarm.nodes] == [0, 1, 1, 1, 1]
    # The next round is one of the others.
    tensors[LIAR][0].fill_(7.0)
    controls = await run_round(swarm, nodes=honest)
    assert all(liar.p2p.peer_id not in control.round.peers for control in controls)
    await swarm.close()


@alone_in_virtual_time
async def test_contradicting_norms_are_proven_by_their_signatures(monkeypatch, caplog):
    """To each of them it says that this one's share is all that there is: nobody sees that more than that comes."""
    tensors = make_tensors(5, liars=(LIAR,))
    deliver = Delivery.run

    async def tell_each_something_else(self, round_id, weight, stripes, claim, generation):
        if is_of(tensors[LIAR], self._traffic.vector):
            norms = [norm if i == self._traffic.other else 0.0 for i, norm in enumerate(claim.norms)]
            claim = NormClaim.make(round_id, norms, swarm.nodes[LIAR].p2p.identity.sign)
        await deliver(self, round_id, weight, stripes, claim, generation)

    monkeypatch.setattr(Delivery, "run", tell_each_something_else)
    swarm = await start(tensors, rule=ClipToMedianNorm(), modes=LIAR_CALLS_ONLY)
    await run_round(swarm)
    liar, honest = swarm.nodes[LIAR], swarm.nodes[1:]
    assert all(torch.equal(flat(each), flat(tensors[1])) for each in tensors)
    await until(lambda: all(node.p2p.metrics.members_untrue for node in honest))
    named = warnings_of(caplog, "has announced different norms of its vector to different members")
    assert len(named) == 4, "the coordinator has shown the proof to all"
    assert all(str(liar.p2p.peer_id) in text for text in named)
    controls = await run_round(swarm, nodes=honest)
    assert all(liar.p2p.peer_id not in control.round.peers for control in controls)
    await swarm.close()


@pytest.mark.parametrize("lie", ["no norms", "too few", "not signed", "of another round"])
@in_virtual_time
async def test_member_without_own_norms_takes_no_part(monkeypatch, lie):
    tensors = make_tensors(5, liars=(LIAR,))
    before = [flat(each) for each in tensors]
    deliver = Delivery.run

    async def tell_nonsense(self, round_id, weight, stripes, claim, generation):
        if is_of(tensors[LIAR], self._traffic.vector):
            sign = swarm.nodes[1 if lie == "not signed" else LIAR].p2p.identity.sign
            norms = claim.norms[:-1] if lie == "too few" else claim.norms
            made = NormClaim.make(b"another round" if lie == "of another round" else round_id, norms, sign)
            claim = NormClaim() if lie == "no norms" else made
        await deliver(self, round_id, weight, stripes, claim, generation)

    monkeypatch.setattr(Delivery, "run", tell_nonsense)
    swarm = await start(tensors, rule=ClipToMedianNorm(), modes=LIAR_CALLS_ONLY)
    controls = await run_round(swarm)
    liar = swarm.nodes[LIAR].p2p.peer_id
    assert all(liar in control.round.failed_peers for control in controls[1:])
    torch.testing.assert_close(flat(tensors[1]), expect(ClipToMedianNorm(), before[1:], [1.0] * 4))
    await swarm.close()


def make_book(accused, rule=ClipToMedianNorm()):  # noqa: B008
    rng = random.Random(0)
    identities = [Identity.generate(rng) for _ in range(3)]
    peers = tuple(identity.peer_id for identity in identities)
    group = GroupInfo(bytes(20), peers, (b"",) * 3, (0, 0, 2), (10, 10, 10))
    return NormBook(b"round", group, rule, lambda member, what: accused.append(member)), identities


def statement_of(identity, norms):
    return NormClaim.make(b"round", norms, identity.sign).statement


def test_only_two_signatures_of_its_own_convict_a_member():
    accused = []
    book, (one, other, _) = make_book(accused)
    told = [1.0, 2.0, 3.0]
    book.take_claim(0, told, statement_of(one, told))
    assert book.norms == {0: (1.0, 2.0, 3.0)}
    assert book.report() == [statement_of(one, told), b"", b""]
    forged = [statement_of(other, [9.0] * 3), bytes(STATEMENT_BYTES), b"short", statement_of(one, told)]
    for statement in forged:
        book.take_report([statement, b"", b"", b"and more"])
        book.take_proofs([0, 7], [statement, forged[0], statement, statement])
    assert not accused
    assert book.show_proofs() == ([], [])
    true = statement_of(one, [9.0] * 3)
    book.take_report([true])
    book.take_report([true])
    assert accused == [0]
    members, statements = book.show_proofs()
    assert (members, statements) == ([0], [statement_of(one, told), true])
    another, _ = make_book(accused)
    another.take_proofs(members, statements)
    assert accused == [0, 0], "everybody can check it"


def test_members_without_values_and_other_rules_need_no_norms():
    book, _ = make_book([])
    assert [book.is_needed_of(member) for member in range(3)] == [True, True, False]
    book.take_claim(2, [], b"")
    with pytest.raises(ProtocolError, match="announced 0 norms for 3 members"):
        book.take_claim(1, [], b"")
    for rule in (None, TrimmedMean(0.2)):
        book, _ = make_book([], rule)
        assert not book.is_needed_of(0)
        book.take_claim(0, [], b"")
        assert book.report() == []


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64, torch.bool]
)
def test_norms_of_all_types(dtype):
    assert norm_of(torch.tensor([3, 4]).to(dtype)) == pytest.approx(2**0.5 if dtype is torch.bool else 5)
    assert norm_of(torch.zeros(3, dtype=dtype)) == 0


def test_norms_of_huge_and_tiny_numbers_are_finite_and_told():
    for size in (1e-30, 1e30):
        assert norm_of(torch.full((4,), size)) == pytest.approx(2 * size)
    assert norm_of(torch.full((4,), 1e200, dtype=torch.float64)) == pytest.approx(2e200)
    assert norm_of(torch.full((4,), 1.7e308, dtype=torch.float64)) == 1e300
    assert norm_of(torch.full((4,), 60000.0, dtype=torch.float16)) == pytest.approx(120000, rel=1e-3)
    assert norm_of(torch.tensor([torch.inf])) == torch.inf


def test_messages_that_say_nothing_of_norms_are_no_longer_for_it():
    for message in (BeginReduce(round_id=b"r", weight=1.0), RoundAlive()):
        encoded = msgspec.msgpack.encode(message)
        assert not any(name in encoded for name in (b"norms", b"statement", b"untrue"))
        assert decode_header(encoded, type(message)) == message
