"""Peers that ask their router for a port: by every protocol, routers that refuse, and one router behind another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nat.laboratory import NEEDS_LABORATORY, NEEDS_PORT_MAPPER, Host, Laboratory
from tests.nat.rules import Kind

pytestmark = [NEEDS_LABORATORY, NEEDS_PORT_MAPPER, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
PORT = 4001
LIMIT = 100.0


class Caller:
    """A program on a host that runs :mod:`.call_others`."""

    def __init__(self, host: Host, *initial_peers: str, port: int = 0) -> None:
        self._program = host.start("-m", "tests.nat.call_others", cwd=ROOT)
        where = {"host_maddrs": [f"/ip4/0.0.0.0/tcp/{port}"], "initial_peers": initial_peers}
        self._program.tell(json.dumps(where))
        started = self._program.wait_for("started", LIMIT)
        self.peer_id, self.addresses = started["peer_id"], started["addresses"]
        self._number = 0

    def ask(self, command: str, *arguments: object) -> Any:
        """The answer to one command."""
        self._number += 1
        self._program.tell(json.dumps([self._number, command, *arguments]))
        answer = self._program.wait_for("number", LIMIT, lambda event: bool(event["number"] == self._number))
        assert "result" in answer, answer
        return answer["result"]

    def leave(self) -> None:
        self._program.tell(json.dumps([0, "leave"]))
        assert self._program.wait(LIMIT) == 0


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory() as lab:
        yield lab


def rules(host: Host) -> str:
    return host.router.run("nft", "list", "chain", "inet", "miniupnpd", "prerouting_miniupnpd")


@pytest.mark.parametrize("protocol", ["PCP", "UPnP"])
def test_a_peer_whose_router_forwards_a_port_is_public(lab: Laboratory, protocol: str) -> None:
    if protocol == "UPnP":
        pytest.importorskip("async_upnp_client")
    first, second, host = lab.host("public"), lab.host("public"), lab.host(Kind.PORT_RESTRICTED)
    host.router.start_port_mapper(upnp=protocol == "UPnP", datagrams=protocol != "UPnP")
    gate = Caller(first)
    witness = Caller(second, gate.addresses[0])
    private = Caller(host, gate.addresses[0], port=PORT)
    assert private.ask("mapping")[protocol] == f"forwards /ip4/{host.outer}/tcp/{PORT}"
    private.ask("wait_until", "public")
    addresses = private.ask("look")["addresses"]
    assert any(address.startswith(f"/ip4/{host.outer}/tcp/{PORT}/") for address in addresses)
    dialled = witness.ask("dial", private.peer_id, addresses)
    assert dialled["relayed"] == [False]
    assert dialled["how"] == []
    assert dialled["at"] == [f"/ip4/{host.outer}/tcp/{PORT}"]
    assert str(PORT) in rules(host)
    private.leave()
    assert str(PORT) not in rules(host)


def test_a_router_that_refuses(lab: Laboratory) -> None:
    first, host = lab.host("public"), lab.host(Kind.CGNAT)
    host.router.start_port_mapper()  # it sees that its own outer address is none
    private = Caller(host, Caller(first).addresses[0], port=PORT)
    verdicts = private.ask("mapping")
    assert "no connection to the outside" in verdicts["NAT-PMP"]
    assert "PCP" in verdicts
    private.ask("wait_until", "relayed")
    assert not any(f"/ip4/{host.outer}/" in address for address in private.ask("look")["addresses"])


def test_the_inner_one_of_two_routers_forwards_from_where_nobody_can_call(lab: Laboratory) -> None:
    first, host = lab.host("public"), lab.host(Kind.CGNAT)
    host.router.start_port_mapper(outer="11.0.200.2")
    private = Caller(host, Caller(first).addresses[0], port=PORT)
    assert private.ask("mapping") == {"PCP": f"forwards /ip4/11.0.200.2/tcp/{PORT}"}
    private.ask("wait_until", "relayed")
    assert not any("11.0.200.2" in address for address in private.ask("look")["addresses"])


def test_a_router_without_any_of_it(lab: Laboratory) -> None:
    first, host = lab.host("public"), lab.host(Kind.PORT_RESTRICTED)
    private = Caller(host, Caller(first).addresses[0], port=PORT)
    verdicts = private.ask("mapping")
    assert all("the router" in verdict for verdict in verdicts.values()), verdicts
    private.ask("wait_until", "relayed")
