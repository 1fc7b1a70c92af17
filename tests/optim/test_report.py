"""What a peer reports of itself: means of the user's figures, what it has counted, and what it refuses from others."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.serializer import MSGPackSerializer
from shoal.dht.crypto import PrivateKey, SignatureValidator, tag_of
from shoal.dht.routing import DHTID
from shoal.dht.validation import CompositeValidator, DHTRecord
from shoal.metrics import Metrics
from shoal.optim.progress.schema import progress_validators
from shoal.optim.report import (
    LARGEST,
    MAX_LOST,
    MAX_METRICS,
    MAX_NAME_CHARACTERS,
    MAX_REASON_CHARACTERS,
    MAX_TROUBLES,
    PERIOD,
    PeerReport,
    Reporting,
    end_of_id,
    key_of_reports,
    parse_report,
)
from shoal.p2p import Identity
from tests.optim.conftest import wait_until

GOOD = PeerReport(1e9, 3, 100, 20, 5.0, {"loss": 2.5}, failure="nobody came", troubles={"alone": 2}, version="0.1.0")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Shelf:
    """Takes what is stored."""

    def __init__(self, depth: int = 0) -> None:
        self.metrics, self.peer_id = Metrics(), Identity.generate().peer_id
        self.p2p, self.stored = SimpleNamespace(metrics=self.metrics), []
        place = "01"[:depth]
        self.tracker = SimpleNamespace(
            exchange=SimpleNamespace(spread=SimpleNamespace(depth=depth, place=place)),
            local_progress=SimpleNamespace(epoch=7),
            unreachable_peers=[],
        )

    def store(self, key, value, expiration, subkey, return_future):
        self.stored.append((key, parse_report(value), subkey))
        return SimpleNamespace(done=lambda: True, result=lambda: True)


def make(depth: int = 0) -> tuple[Reporting, Shelf, Clock]:
    shelf, clock = Shelf(depth), Clock()
    return Reporting(shelf, "run", shelf.tracker, clock), shelf, clock


def test_means_are_weighted_and_published_periodically():
    reporting, shelf, clock = make()
    reporting.report({"loss": 9.0})
    for samples, loss in ((10, 1.0), (30, 2.0)):
        clock.now += 1
        reporting.count(samples)
        reporting.report({"loss": torch.tensor(loss), "accuracy": loss / 10})
        assert len(shelf.stored) == 1, "the first one goes at once, the others wait"
        assert not reporting.is_due
    clock.now = PERIOD
    reporting.report({}, SimpleNamespace(peers=range(4)))
    key, report, subkey = shelf.stored[1]
    assert (key, subkey) == (key_of_reports("run"), tag_of(shelf.peer_id))
    assert report.metrics == pytest.approx({"loss": 1.75, "accuracy": 0.175})
    assert (report.samples, report.recent_samples, report.epoch, report.group_size) == (40, 40, 7, 4)
    assert report.samples_per_second == pytest.approx(40 / PERIOD)
    clock.now = 2 * PERIOD
    reporting.report({})
    assert shelf.stored[2][1].metrics == {}, "figures count once"


def test_in_large_swarms_reports_are_rarer():
    reporting, shelf, clock = make(depth=2)
    reporting.report({})
    clock.now = 2.9 * PERIOD
    reporting.report({})
    clock.now = 3 * PERIOD
    reporting.report({})
    assert [key for key, _, _ in shelf.stored] == ["run_reports.01"] * 2


def test_the_time_of_a_step_has_parts():
    reporting, shelf, clock = make()
    for _ in range(3):
        clock.now += 10
        with reporting.joint_work():
            clock.now += 3
        shelf.metrics.seconds_averaging += 2
        reporting.note_step()
    reporting.report({})
    report = shelf.stored[0][1]
    assert (report.step_seconds, report.joint_seconds, report.averaging_seconds) == (13, 3, 2)


def test_what_a_step_had_is_told():
    rounds = [SimpleNamespace(peers=range(2), weights=(30.0, 12.0))]
    shelf = Shelf()
    reporting = Reporting(shelf, "run", shelf.tracker, Clock(), target_batch_size=64)
    assert reporting.samples_of_round(rounds[-1], own=8) == 42
    assert reporting.samples_of_round(rounds[-1], own=8) == 8, (
        "there was no new round: this peer has made the step alone"
    )
    rounds.append(SimpleNamespace(peers=range(2), weights=(30.0, 20.0)))
    reporting.note_step(reporting.samples_of_round(rounds[-1], own=8))
    reporting.report({})
    report = shelf.stored[0][1]
    assert (report.step_samples, report.step_target) == (50, 64)
    assert report.began > 0


def test_peers_that_cannot_be_reached_are_told():
    reporting, shelf, _ = make()
    shelf.tracker.unreachable_peers = [Identity.generate().peer_id for _ in range(30)]
    reporting.report({})
    assert shelf.stored[0][1].lost == [end_of_id(peer) for peer in shelf.tracker.unreachable_peers[:MAX_LOST]]


def test_counts_are_reported_within_bounds():
    reporting, shelf, _ = make()
    shelf.metrics.rounds_failed, shelf.metrics.last_failure = 2, "line\n" + "x" * 1000
    shelf.metrics.troubles.update({f"kind {number}": number for number in range(100)})
    shelf.metrics.bytes_sent = 2**60
    reporting.report({"loss": math.nan, "large": 1e300})
    report = shelf.stored[0][1]
    assert report.failure.startswith("line x")
    assert len(report.failure) == MAX_REASON_CHARACTERS
    assert len(report.troubles) == MAX_TROUBLES
    assert "kind 99" in report.troubles
    assert report.metrics == {}, "what is not finite is in no mean"


def test_a_loss_that_overflows_is_told_once():
    reporting, shelf, _ = make()
    for loss in (math.nan, torch.tensor(math.inf), 10**400, 1.0, math.nan):
        reporting.report({"loss": loss})
    assert shelf.metrics.troubles == {"loss is NaN, or too large": 2}


def test_long_names_of_figures_hide_nothing():
    """Readers refuse a report with a text that is too long, and with it all that this peer tells."""
    reporting, shelf, _ = make()
    name = "x" * MAX_NAME_CHARACTERS
    reporting.report({name: math.nan})
    ((_, report, _),) = shelf.stored
    ((trouble, count),) = report.troubles.items()
    assert trouble.startswith("xxx")
    assert trouble.endswith("is NaN, or too large")
    assert count == 1


def test_too_many_names_over_time_are_left_out(caplog):
    """How many come together depends on how long steps take: that must not end the training now and then."""
    reporting, shelf, clock = make()
    reporting.report({})
    for number in range(3 * MAX_METRICS):
        reporting.report({f"loss of step {number}": 1.0})
    clock.now = PERIOD
    reporting.report({})
    assert list(shelf.stored[1][1].metrics) == [f"loss of step {number}" for number in range(MAX_METRICS)]
    assert caplog.text.count("more than 24 names of figures in one report: 'loss of step 24'") == 1


def test_what_is_no_figure_is_refused():
    reporting, _, _ = make()
    for value, error, text in (
        ("2", TypeError, "must be a number"),
        (None, TypeError, "must be a number"),
        (True, TypeError, "must be a number"),
        (torch.zeros(2), TypeError, "take its mean"),
    ):
        with pytest.raises(error, match=text):
            reporting.report({"loss": value})
    for name in ("x" * (MAX_NAME_CHARACTERS + 1), "", "\ud800", "loss\n", "\033[2J"):
        with pytest.raises(ValueError, match="1 to 48 printable characters"):
            reporting.report({name: 1.0})
    with pytest.raises(ValueError, match=f"at most {MAX_METRICS}"):
        reporting.report({f"figure {number}": 1.0 for number in range(MAX_METRICS + 1)})


def hostile() -> list[object]:
    good = msgspec.to_builtins(GOOD)
    fields = {name: index for index, name in enumerate(PeerReport.__struct_fields__)}

    def spoilt(name: str, value: object) -> list[object]:
        return [*good[: fields[name]], value, *good[fields[name] + 1 :]]

    return [
        *(None, b"", {}, [], "text", good[:3]),
        *(spoilt("time", value) for value in (math.nan, math.inf, -1.0, "now")),
        *(spoilt("samples", value) for value in (-1, 2**53, 1.5)),
        *(spoilt("samples_per_second", value) for value in (math.nan, -1.0, 1e300)),
        *(spoilt("metrics", {"loss": value}) for value in (math.nan, math.inf, 10 * LARGEST, "1", None, [1.0])),
        spoilt("metrics", {"x" * (MAX_NAME_CHARACTERS + 1): 1.0}),
        spoilt("metrics", {"": 1.0}),
        spoilt("metrics", {b"loss": 1.0}),
        spoilt("metrics", {str(number): 1.0 for number in range(MAX_METRICS + 1)}),
        spoilt("troubles", {str(number): 1 for number in range(MAX_TROUBLES + 1)}),
        spoilt("failure", "x" * (MAX_REASON_CHARACTERS + 1)),
        spoilt("version", "x" * 33),
        spoilt("group_size", -1),
        spoilt("step_samples", -1),
        spoilt("began", math.nan),
        *(spoilt("lost", value) for value in ([b"x" * 9], ["x"], [b""] * 17, None)),
    ]


@pytest.mark.parametrize("value", hostile(), ids=lambda value: repr(value)[:40])
def test_what_cannot_be_is_refused(value):
    with pytest.raises(ValueError, match=r"."):
        parse_report(value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text() | st.integers(), inner, max_size=5),
    max_leaves=30,
)


@given(st.integers(0, len(PeerReport.__struct_fields__) - 1), ANYTHING)
def test_any_report_is_refused_or_shown(index, value):
    fields = [*msgspec.to_builtins(GOOD)]
    fields[index] = value
    for hostile in (fields, value):
        try:
            report = parse_report(hostile)
        except ValueError:
            continue
        assert all(math.isfinite(figure) for figure in report.metrics.values())
        assert len(msgspec.msgpack.encode(report)) < 20_000


def test_nodes_keep_only_valid_reports():
    assert parse_report(MSGPackSerializer.loads(MSGPackSerializer.dumps(msgspec.to_builtins(GOOD)))) == GOOD
    identity = Identity.generate()
    node = CompositeValidator([*progress_validators("run", PrivateKey())])
    own = CompositeValidator([SignatureValidator(PrivateKey(identity.private_key))])
    key = DHTID.generate("run_reports").to_bytes()

    def record(value, tag) -> DHTRecord:
        packed = MSGPackSerializer.dumps(value)
        unsigned = DHTRecord(key, MSGPackSerializer.dumps(tag), packed, 1e10)
        return DHTRecord(key, unsigned.subkey, own.sign_value(unsigned), 1e10)

    assert node.validate(record(msgspec.to_builtins(GOOD), tag_of(identity.peer_id)))
    assert not node.validate(record([1, 2, 3], tag_of(identity.peer_id)))
    assert not node.validate(record(msgspec.to_builtins(GOOD), tag_of(Identity.generate().peer_id)))
    assert not node.validate(record(msgspec.to_builtins(GOOD), b"no owner"))


def test_an_optimizer_reports(make_trainers):
    (trainer,) = make_trainers(1, target=32)
    steps = 0
    while trainer.opt.local_epoch < 2:  # on a busy machine the end of an epoch is noticed a step later
        trainer.step()
        steps += 1
    assert trainer.opt.report_is_due
    trainer.opt.report(loss=torch.tensor(0.5))
    assert not trainer.opt.report_is_due

    def found():
        return trainer.opt.dht.get(key_of_reports(trainer.opt.run_id), latest=True)

    wait_until(found, "the report stands in the table")
    ((tag, entry),) = found().value.items()
    report = parse_report(entry.value)
    assert tag == tag_of(trainer.opt.dht.peer_id)
    assert (report.samples, report.metrics, report.epoch) == (8 * steps, {"loss": 0.5}, trainer.opt.local_epoch)
    assert report.step_seconds > 0
    trainer.opt.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        trainer.opt.report(loss=1.0)
