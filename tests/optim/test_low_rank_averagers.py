"""PowerSGD and PowerEF: against a plain computation, bit by bit between peers, after failures, on the wire."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from shoal.averaging.node import AveragerNode
from shoal.averaging.state.download import layout_of
from shoal.base.clock import get_dht_time
from shoal.base.serializer import MSGPackSerializer
from shoal.compression import Float16Compression, Uniform8BitQuantization
from shoal.errors import AllreduceException, AveragingError, ShoalError
from shoal.optim.grad_averager import GradientAverager
from shoal.optim.low_rank import NEVER, LowRankAverager, LowRankState, LowRankStatement, agree
from shoal.optim.power_ef_averager import PowerEFGradientAverager
from shoal.optim.power_sgd_averager import PowerSGDGradientAverager
from tests.optim.conftest import in_parallel, wait_until

RANK = 2
BOTH = [PowerSGDGradientAverager, PowerEFGradientAverager]


def make_parameters(*shapes: Sequence[int]) -> list[torch.nn.Parameter]:
    shapes = shapes or ((24, 20), (7,), (16, 3, 5), (3, 2), ())
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def make_grads(seed: int, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=rng) for p in parameters]


@pytest.fixture
def make_averagers(make_dhts, closing):
    def make(cls, count: int, clients: int = 0, shapes: Sequence[Sequence[int]] = (), **options) -> list:
        defaults = {"prefix": "grads", "min_matchmaking_time": 30.0, "start": True, "averager_rank": RANK}
        options = {**defaults, **options}
        if cls is GradientAverager:
            del options["averager_rank"]
        return [closing(cls(make_parameters(*shapes), dht=dht, **options)) for dht in make_dhts(count, clients=clients)]

    return make


def contribute(averager: GradientAverager, grads: Sequence[torch.Tensor], batch_size: int = 4) -> None:
    for parameter, grad in zip(averager.parameters, grads, strict=True):
        parameter.grad = grad.clone()
    averager.accumulate_grads_(batch_size)


def run_round(averagers: Sequence[GradientAverager], **options) -> list:
    options = {"expected_group_size": len(averagers), "timeout": 50, **options}
    results = in_parallel(*(lambda a=a: a.step(**options) for a in averagers))
    for averager in averagers:
        averager.notify_used_averaged_gradients()
    return results


def averages(averager: GradientAverager) -> list[torch.Tensor]:
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


def state_of(averager: LowRankAverager) -> LowRankState:
    """What all members share."""
    return averager._state


def put_state(averager: LowRankAverager, state: LowRankState) -> None:
    """As if other rounds had led here."""
    averager._state = state


def errors_of(averager: LowRankAverager) -> list[torch.Tensor]:
    """What was left out and is sent later, for each matrix; only PowerSGD has that."""
    return averager.get_memory()[len(averager.get_buffers()) :]


def fingerprint(averager: LowRankAverager) -> list[torch.Tensor]:
    """Everything that must survive a failed round."""
    return [tensor.clone() for tensor in averager.get_memory()]


def check_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    columns = []
    for column in matrix.double().t():
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


class Reference:
    """Both methods for one matrix, as in the papers, in double precision, with the means computed in one place."""

    def __init__(self, basis: torch.Tensor, shape: Sequence[int], peers: int) -> None:
        self.basis, self.shape = basis.double(), shape
        self.errors = [torch.zeros(shape, dtype=torch.double) for _ in range(peers)]
        self.estimate = torch.zeros(shape, dtype=torch.double)

    def low_rank(self, matrices: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        mean = sum(w * m for w, m in zip(weights, matrices, strict=True))
        left = gram_schmidt(mean @ self.basis)
        self.basis = mean.t() @ left
        return left @ self.basis.t()

    def power_sgd(self, grads: Sequence[torch.Tensor], samples: Sequence[int]) -> torch.Tensor:
        weights = torch.tensor(samples).double() / sum(samples)
        matrices = [g.reshape(self.shape).double() + e / n for g, e, n in zip(grads, self.errors, samples, strict=True)]
        result = self.low_rank(matrices, weights)
        self.errors = [(m - result) * n for m, n in zip(matrices, samples, strict=True)]
        return result

    def power_ef(self, grads: Sequence[torch.Tensor], samples: Sequence[int]) -> torch.Tensor:
        weights = torch.tensor(samples).double() / sum(samples)
        differences = [g.reshape(self.shape).double() - self.estimate for g in grads]
        self.estimate = self.estimate + self.low_rank(differences, weights)
        return self.estimate


@pytest.mark.parametrize("clients", [0, 1])
@pytest.mark.parametrize("cls", BOTH)
def test_rounds_equal_a_plain_computation(make_averagers, cls, clients):
    averagers = make_averagers(cls, 3, clients=clients)
    shapes = {0: (24, 20), 2: (16, 15)}
    bases = state_of(averagers[0]).bases
    assert [len(basis) for basis in bases] == [columns for _, columns in shapes.values()], "what is compressed"
    references = {i: Reference(bases[k], shape, 3) for k, (i, shape) in enumerate(shapes.items())}
    samples = [[4, 4, 4], [2, 10, 1], [5, 3, 8], [1, 1, 20]]
    for number, counts in enumerate(samples):
        grads = [make_grads(10 * number + i, a.parameters) for i, a in enumerate(averagers)]
        for averager, own, count in zip(averagers, grads, counts, strict=True):
            contribute(averager, own, count)
        run_round(averagers)
        weights = torch.tensor(counts).double() / sum(counts)
        for index in range(5):
            mean = sum(w * g[index].double() for w, g in zip(weights, grads, strict=True))
            if index in shapes:
                method = references[index].power_sgd if cls is BOTH[0] else references[index].power_ef
                expected = method([g[index] for g in grads], counts).reshape(mean.shape)
            else:
                expected = mean
            for averager in averagers:
                torch.testing.assert_close(averages(averager)[index].double(), expected, rtol=1e-4, atol=1e-4)
        for averager in averagers[1:]:
            check_equal(averager.get_buffers(), averagers[0].get_buffers())
            check_equal(averages(averager), averages(averagers[0]))
    assert state_of(averagers[0]).rounds == 4


def test_what_is_left_out_is_sent_later(make_averagers):
    """The sum of all results is the sum of all gradients, but for what is still kept, by samples."""
    averagers = make_averagers(PowerSGDGradientAverager, 2, shapes=[(24, 20)])
    total_sent, total = torch.zeros(24, 20), torch.zeros(24, 20)
    for number in range(5):
        counts = [3 + number, 9 - number]
        for i, (averager, count) in enumerate(zip(averagers, counts, strict=True)):
            grads = make_grads(10 * number + i, averager.parameters)
            total += grads[0] * count / 12
            contribute(averager, grads, count)
        run_round(averagers)
        total_sent += averages(averagers[0])[0]
    kept = sum(errors_of(averager)[0] for averager in averagers) / 12
    assert kept.norm() > 0.1
    torch.testing.assert_close(total_sent + kept, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", BOTH)
def test_matrices_of_low_rank_are_exact_at_once(make_averagers, cls):
    averagers = make_averagers(cls, 2, shapes=[(5, 5)], averager_rank=1)
    torch.manual_seed(0)
    direction = torch.randn(5, 5).svd()
    common = torch.outer(direction.U[:, 0], direction.V[:, 0])
    for averager, factor, count in zip(averagers, (1.0, 4.0), (1, 2), strict=True):
        contribute(averager, [common * factor], count)
    run_round(averagers)
    for averager in averagers:
        torch.testing.assert_close(averages(averager)[0], common * 3)


@pytest.mark.parametrize("cls", BOTH)
def test_all_peers_begin_with_the_same_directions(make_averagers, cls):
    first, second = make_averagers(cls, 2)
    check_equal(state_of(first).bases, state_of(second).bases)
    (other_run,) = make_averagers(cls, 1, prefix="others")
    assert not torch.equal(state_of(first).bases[0], state_of(other_run).bases[0])
    for basis in state_of(first).bases:
        assert torch.linalg.matrix_rank(basis) == RANK
        assert abs(basis.mean()) < 0.3


class FailInPhase:
    """Let one member's step fail in a certain all-reduce, as if the others had died."""

    def __init__(self, monkeypatch, averager: LowRankAverager, phase: int, share: float | None) -> None:
        node: AveragerNode = averager.node
        make_session = node.session

        def session(group, lane, weight):
            made, calls = make_session(group, lane, weight), iter(range(100))
            all_reduce = made.all_reduce

            async def failing(tensors, *args, **options):
                result = await all_reduce(tensors, *args, **options)
                if next(calls) != phase:
                    return result
                if share is None:
                    raise AllreduceException("nothing was averaged")
                return type(result)(**{**vars(result), "share_averaged": share})

            made.all_reduce = failing
            return made

        monkeypatch.setattr(node, "session", session)


@pytest.mark.parametrize("share", [None, 0.9])
@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("cls", BOTH)
def test_a_failed_round_leaves_everything_as_it_was(make_averagers, monkeypatch, cls, phase, share):
    averagers = make_averagers(cls, 2)
    for number in range(2):
        for i, averager in enumerate(averagers):
            contribute(averager, make_grads(10 * number + i, averager.parameters))
        if number == 0:
            run_round(averagers)
    unlucky, lucky = averagers
    before = fingerprint(unlucky)
    with monkeypatch.context() as patch:
        FailInPhase(patch, unlucky, phase, share)
        options = {"expected_group_size": 2, "timeout": 50, "allow_retries": False}
        controls = [averager.step(wait=False, reset_accumulators=False, **options) for averager in averagers]
        with pytest.raises(AllreduceException, match="averaged"):
            controls[0].result(50)
        controls[1].exception(50)
    check_equal(fingerprint(unlucky), before)
    if phase == 1:
        assert state_of(lucky).rounds == 2
    for found, expected in zip(averages(unlucky), make_grads(10, unlucky.parameters), strict=True):
        assert torch.equal(found, expected), "its own mean gradient"
    # the next round makes both equal again
    for i, averager in enumerate(averagers):
        averager.reset_accumulated_grads_()
        contribute(averager, make_grads(20 + i, averager.parameters))
    run_round(averagers)
    check_equal(unlucky.get_buffers(), lucky.get_buffers())
    check_equal(averages(unlucky), averages(lucky))


@pytest.mark.parametrize("bad", [0, 1], ids=["compressed", "uncompressed"])
@pytest.mark.parametrize("codec", [None, Float16Compression()], ids=["exact", "lossy"])
@pytest.mark.parametrize("cls", BOTH)
def test_gradients_that_are_not_finite_are_left_out(make_averagers, cls, codec, bad):
    """Also of what peers remember: the next rounds are those of a swarm in which this one had no samples once."""
    averagers = make_averagers(cls, 3, compression=codec)
    for number in range(4):
        grads = [make_grads(10 * number + i, a.parameters) for i, a in enumerate(averagers)]
        if number in (1, 2):
            grads[0][bad].view(-1)[3] = torch.nan if number == 1 else torch.inf
        before = fingerprint(averagers[0])
        for averager, own in zip(averagers, grads, strict=True):
            contribute(averager, own)
        run_round(averagers)
        for averager in averagers:
            weights = dict(zip(averager.last_round.peers, averager.last_round.weights, strict=True))
            assert [weights[a.peer_id] for a in averagers] == [0.0 if number in (1, 2) else 4.0, 4.0, 4.0]
            assert all(tensor.isfinite().all() for tensor in (*averages(averager), *fingerprint(averager)))
            if codec is None:
                check_equal(averages(averager), averages(averagers[1]))
        if number in (1, 2) and cls is PowerSGDGradientAverager:
            errors = len(errors_of(averagers[0]))
            check_equal(fingerprint(averagers[0])[-errors:], before[-errors:])  # it has contributed nothing
        if number in (1, 2):
            mean = (grads[1][1] + grads[2][1]) / 2  # of what is not compressed
            torch.testing.assert_close(averages(averagers[0])[1], mean, atol=0 if codec is None else 2e-3, rtol=1e-5)


@pytest.mark.parametrize("cls", BOTH)
def test_without_finite_gradients_nothing_changes(make_averagers, cls):
    averagers = make_averagers(cls, 2)
    for i, averager in enumerate(averagers):
        contribute(averager, make_grads(i, averager.parameters))
    run_round(averagers)
    before = [fingerprint(averager) for averager in averagers]
    for i, averager in enumerate(averagers):
        grads = make_grads(3 + i, averager.parameters)
        grads[i][1] = torch.nan
        contribute(averager, grads)
    controls = [averager.step(wait=False, expected_group_size=2, timeout=50) for averager in averagers]
    for control, averager, state in zip(controls, averagers, before, strict=True):
        with pytest.raises(ShoalError, match="not finite"):
            control.result(50)
        check_equal(fingerprint(averager), state)


@pytest.mark.parametrize("weights", [(1e15, 1e-38), (1e-38, 1e15), (2.0**53, 2.0**53)])
@pytest.mark.parametrize("cls", BOTH)
def test_huge_weights_and_gradients_stay_finite(make_averagers, cls, weights):
    averagers = make_averagers(cls, 2)
    for number, scale in enumerate([1.0, 3e38, 1e-38, 1.0]):
        for i, averager in enumerate(averagers):
            grads = make_grads(10 * number + i, averager.parameters)
            contribute(averager, [grad.clamp(-1, 1) * scale for grad in grads])
        turn = weights if number % 2 else weights[::-1]
        in_parallel(
            *(
                lambda a=a, w=w: a.step(weight=w, expected_group_size=2, timeout=50)
                for a, w in zip(averagers, turn, strict=True)
            )
        )
        for averager in averagers:
            averager.notify_used_averaged_gradients()
            assert all(tensor.isfinite().all() for tensor in (*averages(averager), *fingerprint(averager)))
            check_equal(averages(averager), averages(averagers[0]))


@pytest.mark.parametrize("cls", BOTH)
def test_gradients_that_vanish_once_do_not_end_everything(make_averagers, cls):
    averagers = make_averagers(cls, 2, shapes=[(24, 20)])
    for number in range(3):
        for i, averager in enumerate(averagers):
            grads = make_grads(i, averager.parameters) if number != 1 else [torch.zeros(24, 20)]
            contribute(averager, grads)
        run_round(averagers)
    assert all(basis.norm(dim=0).min() > 0 for basis in state_of(averagers[0]).bases)
    assert averages(averagers[0])[0].norm() > 1


@pytest.mark.parametrize("cls", BOTH)
def test_a_newcomer_gets_the_state_at_once(make_averagers, make_dhts, closing, cls):
    averagers = make_averagers(cls, 2)
    for number in range(3):
        for i, averager in enumerate(averagers):
            contribute(averager, make_grads(10 * number + i, averager.parameters))
        run_round(averagers)
    (newcomer,) = make_averagers(cls, 1)
    everybody = [*averagers, newcomer]
    before = [state_of(averager) for averager in everybody]
    for i, averager in enumerate(everybody):
        contribute(averager, make_grads(30 + i, averager.parameters), batch_size=4 if i < 2 else 100)
    run_round(everybody)
    assert state_of(newcomer).rounds == 4
    assert newcomer.last_round.weights.count(100) == 1, "its gradients count"
    for averager in everybody[1:]:
        check_equal(averager.get_buffers(), averagers[0].get_buffers())
        check_equal(averages(averager), averages(averagers[0]))
    if cls is PowerEFGradientAverager:  # the estimate of those who had one counts, whatever the weights
        mean = sum(make_grads(30 + i, newcomer.parameters)[0] * n for i, n in enumerate((4, 4, 100))) / 108
        reference = Reference(before[0].bases[0], (24, 20), 1)
        reference.estimate = before[0].estimates[0].double()
        expected = reference.power_ef([mean], [1])
        torch.testing.assert_close(averages(newcomer)[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_no_single_member_replaces_the_estimates(make_averagers):
    averagers = make_averagers(PowerEFGradientAverager, 3)
    for number in range(2):
        for averager in averagers:
            contribute(averager, make_grads(number, averager.parameters))
        run_round(averagers)
    liar, *honest = averagers
    state = state_of(liar)
    made_up = tuple(1e6 * torch.randn_like(estimate) for estimate in state.estimates)
    put_state(liar, state._replace(estimates=made_up, made_by=b"!" * 20, rounds=10**6))
    for averager in averagers:
        contribute(averager, make_grads(2, averager.parameters))
    run_round(averagers)
    for averager in honest:
        assert max(float(average.abs().max()) for average in averages(averager)) < 100


@pytest.mark.parametrize("cls", [GradientAverager, *BOTH])
def test_states_of_other_tensors_are_not_downloaded(make_averagers, cls):
    averager = make_averagers(cls, 1)[0]
    assert averager._expected_layout() == layout_of(averager.get_current_state().tensors)


@pytest.mark.parametrize("cls", BOTH)
def test_a_newcomer_may_download_the_state(make_averagers, cls):
    averagers = make_averagers(cls, 2)
    for i, averager in enumerate(averagers):
        contribute(averager, make_grads(i, averager.parameters))
    run_round(averagers)
    (newcomer,) = make_averagers(cls, 1)
    metadata, tensors = newcomer.load_state_from_peers(timeout=50)
    assert metadata == {"group_bits": ""}
    check_equal(newcomer.get_buffers(), averagers[0].get_buffers())
    check_equal(newcomer.get_buffers(), tensors)
    (other,) = make_averagers(cls, 1, averager_rank=1)
    before = state_of(other)
    assert other.load_state_from_peers(timeout=50) is None, "another rank"
    assert state_of(other) is before


def test_an_empty_state_is_a_state_too(make_averagers):
    averagers = make_averagers(PowerSGDGradientAverager, 2, min_compression_ratio=0.99)
    assert state_of(averagers[0]).bases == (), "nothing is compressed"
    dht = averagers[0].dht
    wait_until(
        lambda: (found := dht.get("grads.all_averagers", latest=True)) and len(found.value) == 2, "both are donors"
    )
    assert averagers[0].load_state_from_peers(timeout=50) is not None
    for i, averager in enumerate(averagers):
        contribute(averager, make_grads(i, averager.parameters))
    run_round(averagers)
    grads = [make_grads(i, averagers[0].parameters) for i in range(2)]
    for found, a, b in zip(averages(averagers[0]), *grads, strict=True):
        torch.testing.assert_close(found, (a + b) / 2)


def test_all_repair_estimates_in_the_same_round(make_averagers):
    averagers = make_averagers(PowerEFGradientAverager, 2, shapes=[(24, 20)], grad_averaging_interval=2)
    drift = torch.full((24, 20), 0.5)
    for number in range(4):
        for i, averager in enumerate(averagers):
            contribute(averager, make_grads(10 * number + i, averager.parameters))
        if number == 1:  # as if one machine computed otherwise
            state = state_of(averagers[1])
            put_state(averagers[1], state._replace(estimates=(state.estimates[0] + drift,)))
        before = [state_of(averager).estimates[0].clone() for averager in averagers]
        run_round(averagers)
        after = [state_of(averager).estimates[0] for averager in averagers]
        if number == 1:
            torch.testing.assert_close(after[1] - after[0], drift)
        if number == 2:
            torch.testing.assert_close(before[1] - before[0], drift)
            assert torch.equal(after[0], after[1])
    check_equal(averages(averagers[0]), averages(averagers[1]))


def test_estimates_that_are_the_same_need_no_repair(make_averagers):
    averagers = make_averagers(PowerEFGradientAverager, 2, shapes=[(200, 100)], grad_averaging_interval=2)
    sent = []
    for number in range(5):
        for i, averager in enumerate(averagers):
            contribute(averager, make_grads(10 * number + i, averager.parameters))
        before = sum(averager.dht.p2p.metrics.bytes_sent for averager in averagers)
        run_round(averagers)
        sent.append(sum(averager.dht.p2p.metrics.bytes_sent for averager in averagers) - before)
    assert max(sent) < 200 * 100 * 4 / 2, "only what is compressed has been sent"
    check_equal(averagers[0].get_buffers(), averagers[1].get_buffers())


@pytest.mark.parametrize("cls", BOTH)
def test_overlapping_steps_begin_with_equal_states(make_averagers, cls):
    averagers = make_averagers(cls, 2)
    first_state = state_of(averagers[1])
    first = [averager.schedule_step(expected_group_size=2, timeout=50) for averager in averagers]
    for i, averager in enumerate(averagers):
        contribute(averager, make_grads(i, averager.parameters))
    averagers[0].step(control=first[0], wait=False)
    assert not averagers[0].is_ready_to_schedule
    assert averagers[1].is_ready_to_schedule
    early = averagers[0].schedule_step(expected_group_size=2, timeout=55)
    averagers[1].step(control=first[1], timeout=50)
    first[0].result(50)
    put_state(averagers[1], first_state._replace(made_by=b"?" * 20, rounds=1))  # as if it had failed there
    for i, averager in enumerate(averagers):
        averager.notify_used_averaged_gradients()
        contribute(averager, make_grads(10 + i, averager.parameters))
    in_parallel(
        lambda: averagers[0].step(control=early, timeout=50),
        lambda: averagers[1].step(expected_group_size=2, timeout=50),
    )
    check_equal(averagers[0].get_buffers(), averagers[1].get_buffers())
    check_equal(averages(averagers[0]), averages(averagers[1]))


def test_estimates_approach_a_steady_gradient(make_averagers):
    averagers = make_averagers(PowerEFGradientAverager, 2, shapes=[(24, 20)])
    grads = [make_grads(i, averagers[0].parameters) for i in range(2)]
    mean, distances = (grads[0][0] + grads[1][0]) / 2, []
    for _ in range(12):
        for averager, own in zip(averagers, grads, strict=True):
            contribute(averager, own)
        run_round(averagers)
        distances.append((averages(averagers[0])[0] - mean).norm().item())
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.02 * mean.norm()


@pytest.mark.parametrize("cls", BOTH)
def test_an_auxiliary_peer_and_one_without_samples(make_averagers, cls):
    averagers = make_averagers(cls, 2, target_group_size=3)
    (helper,) = make_averagers(cls, 1, auxiliary=True, target_group_size=3)
    for number in range(3):
        contribute(averagers[0], make_grads(number, averagers[0].parameters))
        if number == 1:
            contribute(averagers[1], make_grads(10, averagers[1].parameters))
        run_round([*averagers, helper])
        check_equal(averages(averagers[0]), averages(averagers[1]))
        check_equal(averagers[0].get_buffers(), averagers[1].get_buffers())
        assert len(averagers[0].last_round.peers) == 3
    assert state_of(helper).rounds == 0
    assert all(not tensor.any() for tensor in averages(helper))


@pytest.mark.parametrize("cls", BOTH)
def test_other_methods_do_not_meet(make_averagers, make_dhts, closing, cls):
    (first,) = make_averagers(cls, 1, min_matchmaking_time=0.5, request_timeout=0.2)
    (second,) = make_averagers(cls, 1, averager_rank=1, min_matchmaking_time=0.5, request_timeout=0.2)
    controls = [averager.step(wait=False, timeout=2) for averager in (first, second)]
    errors = [control.exception(50) for control in controls]
    assert all(isinstance(error, AveragingError) for error in errors)
    assert any("rank" in str(error) for error in errors)


@pytest.mark.parametrize("cls", BOTH)
def test_what_users_give_reaches_the_other_users(make_averagers, cls):
    averagers = make_averagers(cls, 2)
    controls = [a.schedule_step(get_dht_time() + 30, gather={"mine": i}) for i, a in enumerate(averagers)]
    for averager, control in zip(averagers, controls, strict=True):
        control.expected_group_size = 2
        contribute(averager, make_grads(0, averager.parameters))
    results = in_parallel(*(lambda a=a, c=c: a.step(control=c) for a, c in zip(averagers, controls, strict=True)))
    for result in results:
        assert result == {a.peer_id: {"mine": i} for i, a in enumerate(averagers)}


@pytest.mark.parametrize("cls", BOTH)
def test_matrices_may_be_compressed_once_more(make_averagers, cls):
    averagers = make_averagers(cls, 3, compression=Float16Compression())
    exact = make_averagers(cls, 3, prefix="grads2")
    for averager, other in zip(averagers, exact, strict=True):
        put_state(averager, state_of(other))
    for number in range(2):
        for i, (averager, other) in enumerate(zip(averagers, exact, strict=True)):
            grads = make_grads(10 * number + i, averager.parameters)
            contribute(averager, grads, batch_size=1 + i)
            contribute(other, grads, batch_size=1 + i)
        run_round(averagers)
        run_round(exact)
    for averager in averagers:
        for found, expected in zip(averages(averager), averages(exact[0]), strict=True):
            assert (found - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("cls", BOTH)
def test_accumulated_in_place_with_unequal_batches(make_averagers, cls):
    averagers = make_averagers(cls, 2, shapes=[(24, 20), (3,)], reuse_grad_buffers=True, min_compression_ratio=0.99)
    expected = []
    for i, averager in enumerate(averagers):
        for size in (2, 5 + i):
            grads = make_grads(size, averager.parameters)
            sum((p * g).sum() for p, g in zip(averager.parameters, grads, strict=True)).backward()
            averager.accumulate_grads_(size)
            expected.append((size, grads))
    run_round(averagers)
    for index, found in enumerate(averages(averagers[0])):
        mean = sum(size * grads[index] for size, grads in expected) / sum(size for size, _ in expected)
        torch.testing.assert_close(found, mean)


@pytest.mark.parametrize("cls", BOTH)
def test_bytes_on_the_wire(make_averagers, cls):
    """Rank 4 on the layers of a small transformer, biases and norms included."""
    shapes = [(512, 256), (512,), (768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,)]
    sent = []
    for kind, run in ((GradientAverager, "plain"), (cls, "low")):
        averagers = make_averagers(kind, 2, shapes=shapes, averager_rank=4, prefix=run)
        for number in range(2):
            for i, averager in enumerate(averagers):
                contribute(averager, make_grads(10 * number + i, averager.parameters))
            before = sum(averager.dht.p2p.metrics.bytes_sent for averager in averagers)
            run_round(averagers)
        sent.append(sum(averager.dht.p2p.metrics.bytes_sent for averager in averagers) - before)
    assert sent[1] * 8 <= sent[0], f"{sent[0]} bytes of plain gradients, {sent[1]} of compressed ones"


def train(averagers: Sequence[GradientAverager], steps: int) -> float:
    """A linear map learned from two halves of the data; the share of the loss that is left."""
    rng = torch.Generator().manual_seed(0)
    data = torch.randn(2, 256, 24, generator=rng)
    target = data @ torch.randn(24, 20, generator=rng)
    models = [averager.parameters[0] for averager in averagers]
    for _ in range(steps):
        for i, (averager, model) in enumerate(zip(averagers, models, strict=True)):
            loss = (data[i] @ model - target[i]).square().mean()
            contribute(averager, torch.autograd.grad(loss, [model]), 256)
        run_round(averagers)
        for averager, model in zip(averagers, models, strict=True):
            with torch.no_grad():
                model -= 2.0 * averages(averager)[0]
    assert torch.equal(models[0], models[1])
    return ((data @ models[0] - target).square().mean() / target.square().mean()).item()


@pytest.mark.slow_drill
@pytest.mark.slow
@pytest.mark.parametrize("cls", BOTH)
def test_training_converges_as_without_compression(make_averagers, cls):
    shapes = [(24, 20)]
    loss = train(make_averagers(cls, 2, shapes=shapes), steps=60)
    plain = train(make_averagers(GradientAverager, 2, shapes=shapes, prefix="plain"), steps=60)
    assert loss < 1e-2
    assert plain < 1e-2


def test_arguments_are_checked(make_dhts):
    (dht,) = make_dhts(1)
    options = {"dht": dht, "prefix": "p", "start": False}
    for cls in BOTH:
        with pytest.raises(ValueError, match="averager_rank"):
            cls(make_parameters(), 0, **options)
        with pytest.raises(ValueError, match="averaging_alpha"):
            cls(make_parameters(), 1, averaging_alpha=0.5, **options)
    with pytest.raises(ValueError, match="grad_averaging_interval"):
        PowerEFGradientAverager(make_parameters(), 1, grad_averaging_interval=0, **options)
    averager = PowerEFGradientAverager.get_factory(averager_rank=3, min_comprasion_ratio=0.7)(
        make_parameters(), **options
    )
    assert (averager.rank, averager.min_compression_ratio) == (3, 0.7)


def test_a_round_being_applied_cannot_be_cancelled(make_averagers):
    averagers = make_averagers(PowerSGDGradientAverager, 2)
    unlucky, finish = averagers[0], averagers[0]._finish
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*args) -> None:
        begun.set()
        assert go_on.wait(50)
        finish(*args)

    unlucky._finish = slowly
    for i, averager in enumerate(averagers):
        contribute(averager, make_grads(i, averager.parameters))
    controls = [averager.step(wait=False, expected_group_size=2, timeout=50) for averager in averagers]
    assert begun.wait(50)
    controls[0].cancel()
    go_on.set()
    controls[1].result(50)
    check_equal(averages(unlucky), averages(averagers[1]))  # waits for the lock
    check_equal(unlucky.get_buffers(), averagers[1].get_buffers())


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("codec", [Float16Compression(), Uniform8BitQuantization()], ids=["float16", "8 bits"])
def test_a_damaged_state_counts_as_another(make_averagers, cls, codec):
    averagers = make_averagers(cls, 2, state_compression=codec)
    for number in range(2):
        for i, averager in enumerate(averagers):
            contribute(averager, make_grads(10 * number + i, averager.parameters))
        run_round(averagers)
    (newcomer,) = make_averagers(cls, 1)
    assert newcomer.load_state_from_peers(timeout=50) is not None
    assert (state_of(newcomer).rounds, state_of(newcomer).made_by) == (0, NEVER)
    basis, exact = state_of(newcomer).bases[0], state_of(averagers[0]).bases[0]
    assert (basis - exact).norm() < 0.2 * exact.norm()
    everybody = [*averagers, newcomer]
    for i, averager in enumerate(everybody):
        contribute(averager, make_grads(20 + i, averager.parameters))
    run_round(everybody)
    for averager in everybody[1:]:
        check_equal(averager.get_buffers(), averagers[0].get_buffers())
        check_equal(averages(averager), averages(averagers[0]))


@pytest.mark.parametrize("damage", ["shape", "count", "nan"])
def test_bad_buffers_are_refused(make_averagers, damage):
    (averager,) = make_averagers(PowerEFGradientAverager, 1)
    before, tensors = state_of(averager), averager.get_buffers()
    if damage == "count":
        tensors.pop()
    elif damage == "shape":
        tensors[0] = tensors[0][1:]
    else:
        tensors[0] = tensors[0] * torch.nan
    with pytest.raises(ValueError, match="buffers for low-rank averaging"):
        averager.set_buffers(tensors)
    assert state_of(averager) is before


ORIGINS = [bytes([i]) * 20 for i in range(3)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(ORIGINS[1], 5), (ORIGINS[1], 5)], (ORIGINS[1], False, 5)),
        ([(ORIGINS[1], 5), (NEVER, 0), (NEVER, 0)], (ORIGINS[1], True, 5)),
        ([(ORIGINS[1], 5), (ORIGINS[2], 5), (ORIGINS[1], 5)], (ORIGINS[1], True, 5)),
        ([(ORIGINS[1], 5), (ORIGINS[2], 5)], (ORIGINS[2], True, 5)),
        ([(ORIGINS[1], 6), (ORIGINS[2], 5)], (ORIGINS[1], True, 6)),
        ([(ORIGINS[1], 5), (ORIGINS[1], 5), (ORIGINS[2], 10**9)], (ORIGINS[1], True, 7)),  # perhaps a lie
        ([(ORIGINS[1], 5), (ORIGINS[1], 5), (None, 10**9)], (ORIGINS[1], True, 7)),
        ([(NEVER, 0), (NEVER, 0)], (NEVER, False, 0)),
        ([(None, 7), (ORIGINS[1], 5)], (ORIGINS[1], True, 7)),  # one is in another round and cannot tell
        ([(None, 0), (ORIGINS[1], 5)], (ORIGINS[1], False, 5)),  # an auxiliary peer has no state
        ([(None, 0), (None, 3)], (None, True, 3)),
        ([(None, 0), (None, 0)], (None, False, 0)),
    ],
)
def test_what_follows_from_what_members_say(said, expected):
    statements = [LowRankStatement(b"", made_by, rounds, b"") for made_by, rounds in said]
    assert tuple(agree(statements)) == (*expected, False)
    assert tuple(agree(statements[::-1])) == (*expected, False), "the order of members makes no difference"


@pytest.mark.parametrize(
    ("digests", "same_bits"),
    [([b"a", b"a"], True), ([b"a", b"b"], False), ([b"", b""], False), ([b"a", b""], False)],
)
def test_states_are_the_same_if_all_digests_are(digests, same_bits):
    statements = [LowRankStatement(b"", ORIGINS[1], 5, digest) for digest in digests]
    auxiliary = LowRankStatement(b"", None, 0, b"")
    assert agree([*statements, auxiliary]) == (ORIGINS[1], False, 5, same_bits)
    newcomer = LowRankStatement(b"", NEVER, 0, digests[0])
    assert not agree([*statements, newcomer]).same_bits


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        [],
        [1, 2, 3, 4],
        [b"x", b"x" * 20, 1],
        [b"x", b"short", 0, b""],
        [b"x", b"x" * 20, -1, b""],
        [b"x", b"x" * 20, 2**60, b""],
        [b"x", b"x" * 20, 1, "digest"],
        {"a": 1},
    ],
)
def test_nothing_follows_from_nonsense(value):
    statement = LowRankStatement.parse(MSGPackSerializer.dumps(value))
    assert statement[1:] == (None, 0, b"")
    assert LowRankStatement.parse(b"\xc1 no msgpack") == (b"", None, 0, b"")


@pytest.mark.parametrize(("rank", "is_warned"), [(3, True), (4, False)])
def test_a_rank_that_is_too_low_warns(rank, is_warned, make_averagers, caplog):
    """The shorter side of a matrix counts: noise has that many directions."""
    make_averagers(PowerEFGradientAverager, 1, shapes=[(64, 300), (20, 4000)], averager_rank=rank, start=False)
    warned = [text for text in caplog.messages if "too inexact" in text]
    assert len(warned) == is_warned
    assert all("rank 3" in text and "64 wide" in text and "rank 4 or more" in text for text in warned)


def test_only_power_ef_warns_of_its_rank(make_averagers, caplog):
    make_averagers(PowerSGDGradientAverager, 1, shapes=[(64, 300)], averager_rank=1, start=False)
    make_averagers(PowerEFGradientAverager, 1, shapes=[(64, 300)], averager_rank=1, start=False, warn=False)
    assert not [text for text in caplog.messages if "too inexact" in text]
