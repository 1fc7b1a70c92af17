"""``shoal doctor`` on hosts behind routers of every kind: what it says is what is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nat.laboratory import NEEDS_LABORATORY, NEEDS_PORT_MAPPER, Host, Laboratory
from tests.nat.rules import Kind

pytestmark = [NEEDS_LABORATORY, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
LIMIT = 100.0
SEEN_BY_OTHERS = "this machine, as others see it"


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


def start_seed(host: Host) -> str:
    """Run ``shoal dht`` on a public host; returns its address."""
    program = host.start("-m", "shoal.cli", "dht", "--ephemeral", "--refresh-period", "1", cwd=ROOT)
    return program.wait_for_line(r"  (/ip4/11\.\S+)", LIMIT)[1]


def doctor(host: Host, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Its findings by subject and check."""
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "shoal.cli", "doctor", "--json", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "SHOAL_HOST_MADDRS"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=LIMIT, check=False
    )
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return {(each["about"], each["check"]): each for each in findings}


def test_a_public_host(lab: Laboratory) -> None:
    seeds = [start_seed(lab.host("public")) for _ in range(2)]
    host = lab.host("public")
    found = doctor(host, *seeds)
    assert not [each for each in found.values() if each["verdict"] == "fail"], found
    reachable = found[SEEN_BY_OTHERS, "reachable"]
    assert reachable["verdict"] == "ok"
    assert f"public: /ip4/{host.outer}/" in reachable["text"]
    assert found[SEEN_BY_OTHERS, "NAT"]["values"]["nat"] == "none"
    assert "no limit to their rate" in found[seeds[0], "relay"]["text"]
    assert found[seeds[0], "circuit"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("kind", "nat"),
    [(Kind.PORT_RESTRICTED, "easy"), pytest.param(Kind.SYMMETRIC, "hard", marks=pytest.mark.slow_drill)],
)
def test_a_private_host(lab: Laboratory, kind: Kind, nat: str) -> None:
    seeds = [start_seed(lab.host("public")) for _ in range(2)]
    host = lab.host(kind)
    found = doctor(host, *seeds)
    assert not [each for each in found.values() if each["verdict"] == "fail"], found
    assert found[seeds[0], "dial back"]["verdict"] == "warn"
    assert found[seeds[0], "circuit"]["verdict"] == "ok"
    reachable = found[SEEN_BY_OTHERS, "reachable"]
    assert reachable["values"]["reachability"] == "relayed", reachable
    assert reachable["values"]["seen_at"] == [host.outer]
    assert found[SEEN_BY_OTHERS, "NAT"]["values"]["nat"] == nat
    mapping = found[SEEN_BY_OTHERS, "port mapping"]
    assert mapping["verdict"] == "warn"
    assert "no answer" in mapping["text"]


def test_a_private_host_without_a_relay(lab: Laboratory) -> None:
    program = lab.host("public").start(
        "-m", "shoal.cli", "dht", "--ephemeral", "--no-relay", "--refresh-period", "1", cwd=ROOT
    )
    seed = program.wait_for_line(r"  (/ip4/11\.\S+)", LIMIT)[1]
    found = doctor(lab.host(Kind.PORT_RESTRICTED), seed)
    program.wait_for_line("No relay for others", LIMIT)
    assert found[seed, "dial back"]["verdict"] == "fail"
    assert "it is none" in found[seed, "relay"]["text"]
    reachable = found[SEEN_BY_OTHERS, "reachable"]
    assert reachable["verdict"] == "fail"
    assert "no relay takes it" in reachable["text"]
    assert "open TCP port" in reachable["fix"]


@NEEDS_PORT_MAPPER
def test_a_router_that_forwards_a_port(lab: Laboratory) -> None:
    seed = start_seed(lab.host("public"))
    host = lab.host(Kind.PORT_RESTRICTED)
    host.router.start_port_mapper()
    found = doctor(host, seed)
    assert f"public: /ip4/{host.outer}/" in found[SEEN_BY_OTHERS, "reachable"]["text"]
    mapping = found[SEEN_BY_OTHERS, "port mapping"]
    assert mapping["verdict"] == "ok"
    assert "others reach this machine there" in mapping["text"]


@NEEDS_PORT_MAPPER
def test_a_router_behind_another_one(lab: Laboratory) -> None:
    seed = start_seed(lab.host("public"))
    host = lab.host(Kind.CGNAT)
    host.router.start_port_mapper(outer="11.0.200.2")
    found = doctor(host, seed)
    assert found[SEEN_BY_OTHERS, "reachable"]["values"]["reachability"] == "relayed"
    mapping = found[SEEN_BY_OTHERS, "port mapping"]
    assert mapping["verdict"] == "warn"
    assert "others do not reach this machine there" in mapping["text"]


def test_ipv6_behind_a_firewall(lab: Laboratory) -> None:
    line = lab.host("public", ipv6="open")
    seed = start_seed(line)
    host = lab.host(Kind.PORT_RESTRICTED, ipv6="firewalled")
    found = doctor(host, seed)
    ipv6 = found[SEEN_BY_OTHERS, "IPv6"]
    assert ipv6["values"]["global_addresses"], ipv6
    assert "behind a firewall" in ipv6["text"]
