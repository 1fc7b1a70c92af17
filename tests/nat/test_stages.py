"""Two peers whose routers cannot be punched hold neighbouring stages, and train through a relay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nat.hold_a_stage import BOUNDARY_BYTES
from tests.nat.laboratory import NEEDS_LABORATORY, Laboratory
from tests.nat.rules import Kind
from tests.nat.test_strangers import LIMIT, start_seed, traffic

pytestmark = [NEEDS_LABORATORY, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parent / "hold_a_stage.py"
STEPS = 5


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


def test_neighbouring_stages_behind_symmetric_routers_train_through_a_relay(lab: Laboratory) -> None:
    public = lab.host(Kind.PUBLIC)
    hosts = [lab.host(Kind.SYMMETRIC) for _ in range(2)]
    address = start_seed(public)
    driver, _ = (host.start(PROGRAM, address, stage) for stage, host in enumerate(hosts))
    began = driver.wait_for("step", LIMIT, lambda event: event["step"] >= 1)
    before = traffic(public, *hosts)
    ended = driver.wait_for("step", LIMIT, lambda event: event["step"] >= began["step"] + STEPS)
    direct, relayed = (after - then for after, then in zip(traffic(public, *hosts), before, strict=True))
    assert began["reachability"] == ended["reachability"] == "relayed"
    assert ended["loss"] < began["loss"]
    assert not ended["dropped"]
    assert relayed > (ended["done"] - began["done"]) * 2 * BOUNDARY_BYTES / 2, "tensors go both ways, some before that"
    assert direct < relayed / 10
