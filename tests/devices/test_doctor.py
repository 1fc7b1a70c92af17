"""``shoal doctor --device``: it finds what is wrong on a device, and nothing where nothing is."""

from __future__ import annotations

import json

import pytest
import torch

from shoal.cli.__main__ import main
from shoal.cli.doctor.device import WAYS, available_devices, find_device, look_at_device
from shoal.cli.doctor.findings import Finding, Severity
from shoal.optim.gradient_accumulator import GradientAccumulator
from tests.fake_device import FakeDevice

pytestmark = pytest.mark.timeout(240)  # five trainings, each with time limits of its own

CHECKS = ["training", "newcomer", *(way.check for way in WAYS[1:])]


def examine(name: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in look_at_device(find_device(name))}


def test_all_is_well(fake: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--device", "fake:1"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [each["check"] for each in findings if each["about"] == "device fake:1"] == CHECKS
    assert {each["verdict"] for each in findings if each["about"] == "device fake:1"} == {"ok"}
    assert fake.counts()["d2h"] > 0


def test_gradients_that_are_read_before_they_have_arrived(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def add_too_early(self: GradientAccumulator, batch_size: int, loss_scale: float = 1.0) -> None:
        for total, parameter in zip(self.buffers, self.parameters, strict=True):
            assert parameter.grad is not None
            total.add_(parameter.grad.to(total.device, non_blocking=True).nan_to_num())
        self._first_batch_size, self._untouched = batch_size, set()
        self.samples += batch_size
        self.batches += 1

    monkeypatch.setattr(GradientAccumulator, "add", add_too_early)
    with fake.late(20):
        found = examine("fake")
    assert found["training"].verdict is Severity.OK
    assert found["CPU sums"].verdict is Severity.FAIL
    assert "differ by up to" in found["CPU sums"].text
    assert "leave accumulate_grads_on out" in found["CPU sums"].fix


def test_a_kernel_that_is_not_there(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("the operator 'aten::tanh' is not there for this device")

    monkeypatch.setattr(torch.nn.Tanh, "forward", lambda self, x: torch.tanh(x) if x.is_cpu else fail())
    found = examine("fake")
    assert {finding.verdict for finding in found.values()} == {Severity.FAIL}
    assert "NotImplementedError: the operator 'aten::tanh'" in found["training"].text


@pytest.mark.usefixtures("fake")
def test_what_is_available() -> None:
    assert available_devices() == ["cpu", "fake", "fake:0", "fake:1"]
    assert find_device("fake:1") == torch.device("fake:1")
