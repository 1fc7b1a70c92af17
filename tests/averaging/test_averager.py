"""The averager as users hold it, over real connections."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest
import torch

from shoal.averaging import AveragingStage, DecentralizedAverager
from shoal.dht import DHT
from shoal.errors import AllreduceException, ReactorError

pytestmark = [pytest.mark.devices, pytest.mark.pretend]


@pytest.fixture
def dhts():
    first = DHT(start=True)
    made = [first, *(DHT(first.get_visible_maddrs(), start=True) for _ in range(3))]
    yield made
    for dht in made:
        dht.shutdown()


@pytest.fixture
def make(dhts):
    made = []

    def make_averager(index, tensors, kind=DecentralizedAverager, **options):
        options = {"prefix": "run", "min_matchmaking_time": 30.0, "start": True, **options}
        made.append(kind(tensors, dhts[index], **options))
        return made[-1]

    yield make_averager
    for averager in made:
        averager.shutdown()
        assert not averager.is_alive()


def step_all(averagers, **options):
    controls = [
        averager.step(wait=False, timeout=50, expected_group_size=len(averagers), gather=i, **options)
        for i, averager in enumerate(averagers)
    ]
    return [control.result(timeout=55) for control in controls]


def until(condition):
    """Wait for another thread; the test's time limit ends the wait."""
    while not condition():
        time.sleep(0.01)


def test_four_peers_average(make):
    tensors = [[torch.full((100,), float(i)), torch.tensor(float(i))] for i in range(4)]
    averagers = [make(i, each) for i, each in enumerate(tensors)]
    results = step_all(averagers)
    assert all(result == {a.peer_id: i for i, a in enumerate(averagers)} for result in results)
    for averager in averagers:
        with averager.get_tensors() as mine:
            assert torch.equal(mine[0], torch.full((100,), 1.5))
            assert mine[1] == 1.5
        assert averager.last_round.share_averaged == 1
        assert averager.last_updated > 0


def test_tensors_that_are_views_or_not_contiguous_are_changed_in_place(make):
    base = torch.zeros(4, 6)
    parameter = torch.nn.Parameter(torch.full((6, 4), 3.0))
    a = make(0, [base.t()])
    b = make(1, [parameter])
    step_all([a, b])
    assert torch.equal(base, torch.full((4, 6), 1.5))
    assert torch.equal(parameter.detach(), torch.full((6, 4), 1.5))


def test_no_tensor_changes_while_user_code_holds_them(make):
    a, b = make(0, [torch.zeros(10)]), make(1, [torch.ones(10)])
    with a.get_tensors() as tensors:
        controls = [x.step(wait=False, timeout=50, expected_group_size=2) for x in (a, b)]
        until(lambda: all(control.stage is AveragingStage.RUNNING_ALLREDUCE for control in controls))
        assert torch.equal(tensors[0], torch.zeros(10))
        assert not controls[0].done()
        assert not controls[1].done()
    for control in controls:
        control.result(timeout=50)
    with a.get_tensors() as tensors:
        assert torch.equal(tensors[0], torch.full((10,), 0.5))


def test_too_few_peers_fail_in_time(make):
    a, b = make(0, [torch.zeros(1)], initial_group_bits="0"), make(1, [torch.zeros(1)], initial_group_bits="1")
    controls = [x.step(wait=False, timeout=1.0) for x in (a, b)]
    for control in controls:
        with pytest.raises(AllreduceException, match="could not find a group"):
            control.result(timeout=10)


def test_group_bits_round_trip(make):
    averager = make(0, [torch.zeros(1)], initial_group_bits="0101")
    assert averager.get_group_bits() == "0101"
    averager.set_group_bits("11")
    assert averager.get_group_bits() == "11"
    assert averager.get_group_bits(wait=False).result(timeout=5) == "11"
    with pytest.raises(AssertionError, match="0 and 1"):
        averager.set_group_bits("2")


def test_newcomer_downloads_a_copy_of_the_state(make):
    calls = []

    class Donor(DecentralizedAverager):
        def get_current_state(self):
            calls.append(threading.current_thread().name)
            with self.get_tensors() as tensors:
                return {"epoch": 7, "nested": [1, "x", None]}, tensors

    donor_tensors = [torch.arange(300_000, dtype=torch.float32), torch.zeros(0)]
    donor = make(0, donor_tensors, kind=Donor)
    receiver = make(1, [torch.zeros(300_000), torch.zeros(0)], allow_state_sharing=False)
    until(lambda: receiver.load_state_from_peers(timeout=50) is not None)
    calls.clear()
    metadata, tensors = receiver.load_state_from_peers(timeout=50)
    assert metadata == {"epoch": 7, "nested": [1, "x", None]}
    assert [tuple(tensor.shape) for tensor in tensors] == [(300_000,), (0,)]
    donor_tensors[0].zero_()
    assert torch.equal(tensors[0], torch.arange(300_000, dtype=torch.float32, device="cpu"))
    assert len(calls) == 1
    donor.allow_state_sharing = False
    until(lambda: receiver.load_state_from_peers(timeout=50) is None)
    assert len(calls) <= 2
    donor.allow_state_sharing = True
    until(lambda: receiver.load_state_from_peers(wait=False).result(timeout=50) is not None)


def test_donors_with_higher_priority_are_preferred(make):
    donors = [make(i, [torch.full((1,), float(i))]) for i in range(3)]
    receiver = make(3, [torch.zeros(1)], allow_state_sharing=False)
    for donor, priority in zip(donors, (3, 5, 4), strict=True):
        donor.state_sharing_priority = priority

    def best():
        state = receiver.load_state_from_peers(timeout=50)
        return None if state is None else state[1][0].item()

    until(lambda: best() == 1)
    donors[0].state_sharing_priority = 10
    until(lambda: best() == 0)
    donors[0].allow_state_sharing = False
    assert best() in (1, 2)


def test_client_mode_cannot_share(dhts):
    client = DHT(dhts[0].get_visible_maddrs(), start=True, client_mode=True)
    averager = DecentralizedAverager([torch.zeros(1)], client, prefix="run", start=True)
    assert averager.client_mode
    assert not averager.allow_state_sharing
    with pytest.raises(ValueError, match="client mode"):
        averager.allow_state_sharing = True
    with pytest.raises(ValueError, match="client mode"):
        averager.state_sharing_priority = 1
    averager.state_sharing_priority = 0
    averager.shutdown()
    client.shutdown()


def test_client_averages_with_a_node(dhts, make):
    client_dht = DHT(dhts[0].get_visible_maddrs(), start=True, client_mode=True)
    client = DecentralizedAverager([torch.zeros(5)], client_dht, prefix="run", min_matchmaking_time=30.0, start=True)
    node = make(1, [torch.ones(5)])
    step_all([client, node])
    with client.get_tensors() as tensors:
        assert torch.equal(tensors[0], torch.full((5,), 0.5))
    client.shutdown()
    client_dht.shutdown()


def test_shutdown_resolves_what_is_outstanding(make):
    averager = make(0, [torch.zeros(1)])
    control = averager.step(wait=False)
    averager.shutdown()
    with pytest.raises(concurrent.futures.CancelledError):
        control.result(timeout=5)
    averager.shutdown()
    with pytest.raises(ReactorError, match="shut down"):
        averager.step(wait=False)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"prefix": "a.b"}, AssertionError, "dots"),
        ({"initial_group_bits": "012"}, AssertionError, "0 and 1"),
        ({"bandwidth": -1.0}, AssertionError, "bandwidth"),
        ({"bandwidth": float("inf")}, AssertionError, "bandwidth"),
        ({"auxiliary": True, "client_mode": True}, AssertionError, "client_mode"),
        ({"reducer_timeout": 5.0}, ValueError, "reducer_timeout"),
        ({"reducer_timeout": 5.0, "sender_timeout": 5.0}, ValueError, "reducer_timeout"),
        ({"averaging_expiration": 5.0, "min_matchmaking_time": 3.0}, AssertionError, "old name"),
    ],
)
def test_bad_arguments(make, options, error, text):
    with pytest.raises(error, match=text):
        make(0, [torch.zeros(1)], **options)


def test_bad_tensors(make):
    with pytest.raises(AssertionError, match="leaf"):
        make(0, [torch.nn.Parameter(torch.zeros(2)) * 2])


def test_bad_steps(make):
    averager = make(0, [torch.zeros(1)])
    with pytest.raises(AssertionError, match="weight"):
        averager.step(weight=-1)
    with pytest.raises(AssertionError, match="trigger"):
        averager.step(require_trigger=True)
    with pytest.raises(AssertionError, match="deadline"):
        averager.step(scheduled_time=1e12, timeout=5)
    with pytest.raises(TypeError, match="serialize"):
        averager.step(gather=object())
