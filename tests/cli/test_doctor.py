"""``shoal doctor``: every check with a cause that is really there, and the command as a user runs it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.base.clock import SwarmClock
from shoal.cli.__main__ import main
from shoal.cli.doctor import peer as peer_module
from shoal.cli.doctor.command import SEEN_BY_OTHERS, THIS_MACHINE
from shoal.cli.doctor.findings import (
    ENOUGH_OPEN_FILES,
    INDENT,
    Finding,
    Severity,
    describe_listening,
    fail,
    look_at_machine,
    ok,
    summary,
    unknown,
    warn,
)
from shoal.cli.doctor.peer import look_at_peer
from shoal.dht import DHT, DHTNode
from shoal.net.own_addresses import OwnAddress, OwnAddresses
from shoal.net.tcp.transport import TcpTransport
from shoal.p2p import P2P, Identity, Multiaddr, PeerID
from shoal.reach.checkup import Checkup
from tests.dht.members import Authority, Member
from tests.p2p.peers import Peers

pytestmark = pytest.mark.timeout(300)  # commands import much
STRANGER = Identity.generate().peer_id


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 60, 80, 133])
def test_lines_fit_into_a_terminal(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if width is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(width))
    long = " ".join(["words"] * 60)
    for finding in (ok("check", long), warn("check", long, long), fail("a long check", f"{long}\n{long}", long)):
        lines = finding.lines()
        assert (width or 80) - len("words") <= max(map(len, lines)) <= (width or 80)
        assert len({line.index(line.split()[-1]) >= INDENT for line in lines}) == 1
    assert ok("check", "fine").lines() == ["  ok       check          fine"]
    assert unknown("check", "who knows").lines() == ["  unknown  check          who knows"]
    assert fail("check", "bad", "do this").lines() == [
        "  FAIL     check          bad",
        "                          -> do this",
    ]


def test_lines_in_a_window_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    assert ok("check", "more words than fit").lines()


def test_what_others_tell_does_not_rule_the_terminal() -> None:
    lines = ok("check", "\x1b[2J\x07" + "x" * 10_000).lines()
    assert all(line.isprintable() for line in lines)
    assert sum(map(len, lines)) < 3000


def test_summary() -> None:
    good, odd, bad = ok("a", "b"), warn("a", "b", "c"), fail("a", "b", "c")
    assert summary([good]) == "All is well."
    assert summary([good, odd, bad, bad]) == "2 problems, 1 warning: see the lines with an arrow."
    assert summary([odd]).startswith("1 warning:")
    assert summary([good, unknown("a", "b")]) == "All is well, as far as is known: 1 unknown."


# --- this machine -----------------------------------------------------------------------------------------------------


def machine(identity_path: Path | None = None) -> dict[str, Finding]:
    return {finding.check: finding for finding in look_at_machine(identity_path)}


def test_this_machine_is_fine() -> None:
    found = machine()
    assert found["versions"].verdict is Severity.OK
    assert "torch" in found["versions"].text
    assert found["event loop"].verdict is Severity.OK
    assert "identity file" not in found


def test_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = machine()["event loop"]
    if sys.platform == "win32":
        assert found.verdict is Severity.OK
    else:
        assert (found.verdict, found.fix) == (Severity.WARN, "pip install uvloop")


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for limits, verdict in (
        ((256, 4096), Severity.WARN),
        ((ENOUGH_OPEN_FILES, 4096), Severity.OK),
        ((-1, -1), Severity.OK),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        assert machine()["open files"].verdict is verdict
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    assert machine()["open files"].fix == "run: ulimit -n 512"


@pytest.mark.skipif(os.name != "posix", reason="no such file modes")
def test_identity_file(tmp_path: Path) -> None:
    path = tmp_path / "id.key"
    assert "does not exist yet" in machine(path)["identity file"].text
    identity = Identity.load_or_create(path)
    assert str(identity.peer_id) in machine(path)["identity file"].text
    path.chmod(0o644)
    found = machine(path)["identity file"]
    assert (found.verdict, found.fix) == (Severity.FAIL, f"run: chmod 600 {path}")
    path.chmod(0o600)
    path.write_bytes(b"something else")
    assert "cannot use identity file" in machine(path)["identity file"].text
    found = machine(tmp_path / "no" / "id.key")["identity file"]
    assert (found.verdict, found.fix) == (Severity.FAIL, f"run: mkdir -p {tmp_path / 'no'}")


@pytest.mark.parametrize(
    ("hosts", "verdict", "words"),
    [
        (["/ip4/127.0.0.1", "/ip6/::1"], Severity.WARN, "this machine alone"),
        (["/ip4/127.0.0.1", "/ip4/192.168.1.2"], Severity.WARN, "local network alone"),
        (["/ip4/127.0.0.1", "/ip4/8.8.8.8"], Severity.OK, "8.8.8.8"),
        (["/dns4/example.org"], Severity.OK, "example.org"),
    ],
)
def test_listening(hosts: list[str], verdict: Severity, words: str) -> None:
    found = describe_listening([Multiaddr(f"{host}/tcp/5/p2p/{STRANGER}") for host in hosts])
    assert found.verdict is verdict
    assert words in found.text
    assert "/p2p/" not in found.text


# --- other peers ------------------------------------------------------------------------------------------------------


async def examine(
    p2p: P2P, address: str, peer: PeerID | None = STRANGER, keeps_identity: bool = False
) -> dict[str, Finding]:
    found = look_at_peer(p2p, Multiaddr(address), peer, keeps_identity=keeps_identity)
    return {finding.check: finding async for finding in found}


async def examine_each_other(**options: Any) -> dict[str, Finding]:
    async with Peers("tcp") as peers:
        server, caller = await peers.start(), await peers.start(**options)
        node = await DHTNode.create(p2p=server)
        caller.clock = SwarmClock()  # as if it was another process
        [address] = server.get_addresses(server.peer_id)
        try:
            return await examine(caller, str(address), server.peer_id)
        finally:
            await node.shutdown()


def only_failure(found: dict[str, Finding]) -> Finding:
    failures = [finding for finding in found.values() if finding.verdict is Severity.FAIL]
    assert len(failures) == 1, found
    assert failures[0].fix
    return failures[0]


async def test_a_good_peer() -> None:
    found = await examine_each_other()
    assert list(found) == [
        "connection",
        "handshake",
        "versions",
        "table",
        "round trip",
        "clock",
        "dial back",
        "bandwidth",
    ]
    assert {finding.verdict for finding in found.values()} == {Severity.OK}, found
    assert 0 < found["round trip"].values["best_seconds"] <= found["round trip"].values["median_seconds"]
    assert abs(found["clock"].values["ahead_seconds"]) < 0.25
    assert found["bandwidth"].values["up_megabits"] > 10
    assert found["bandwidth"].values["down_megabits"] > 10


async def test_in_client_mode_nobody_has_to_dial_back() -> None:
    found = await examine_each_other(client_mode=True)
    assert "dial back" not in found
    assert {finding.verdict for finding in found.values()} == {Severity.OK}, found


async def test_cannot_be_dialled_back() -> None:
    failure = only_failure(await examine_each_other(announce_maddrs=["/ip4/127.0.0.2/tcp/1"]))
    assert failure.check == "dial back"
    assert "/ip4/127.0.0.2/tcp/1" in failure.text
    assert "`shoal dht`" in failure.fix
    assert "client_mode" not in failure.fix, "a peer that nobody can call is called through a relay"


@asynccontextmanager
async def server(behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behave(reader, writer)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"/ip4/127.0.0.1/tcp/{running.sockets[0].getsockname()[1]}"
    finally:
        running.close()


async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    await writer.drain()


async def test_ports_where_no_peer_listens() -> None:
    async with Peers("tcp") as peers:
        p2p = await peers.start()
        with socket.socket() as silent:  # which has the port, so that nobody else gets it, but does not listen
            silent.bind(("127.0.0.1", 0))
            failure = only_failure(await examine(p2p, f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"))
        assert (failure.check, failure.text.partition(":")[0]) == ("connection", "connection refused")
        failure = only_failure(await examine(p2p, "/dns4/no-such-host.invalid/tcp/1"))
        assert failure.check == "name"
        assert "cannot be resolved" in failure.text
        failure = only_failure(await examine(p2p, "/ip4/127.0.0.1/udp/1"))
        assert failure.check == "address"
        async with server(web_server) as address:
            failure = only_failure(await examine(p2p, address))
            assert failure.check == "handshake"
            assert "does not speak TLS" in failure.text


async def test_names_are_resolved() -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        [address] = there.get_addresses(there.peer_id)
        found = await examine(caller, f"/dns4/localhost/tcp/{address['tcp']}", there.peer_id)
        assert found["name"].values == {"addresses": ["127.0.0.1"]}
        assert found["bandwidth"].verdict is Severity.OK


async def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "HANDSHAKE_TIMEOUT", 0.1)

    async def wait_for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(peer_module, "connect", wait_for_ever)
    async with Peers("tcp") as peers:
        failure = only_failure(await examine(await peers.start(), "/ip4/127.0.0.1/tcp/1"))
    assert failure.check == "connection"
    assert "no answer within" in failure.text


async def test_reachable_peer_that_announces_only_loopback() -> None:
    async with Peers("tcp") as peers:
        there = await DHTNode.create(p2p=await peers.start(host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        address = (await there.get_visible_maddrs())[0].decapsulate(f"/p2p/{there.peer_id}")
        assert "announces" not in await examine(await peers.start(), str(address), there.peer_id)
        named = str(address).replace("/ip4/127.0.0.1/", "/dns4/localhost/")  # as if a router forwarded the port
        found = (await examine(await peers.start(), named, there.peer_id))["announces"]
        assert found.verdict is Severity.WARN
        assert f"it tells others {address}," in found.text
        assert "host_maddrs=" in found.fix
        await there.shutdown()


async def test_address_without_a_peer_id() -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        node = await DHTNode.create(p2p=there)
        [address] = there.get_addresses(there.peer_id)
        found = await examine(caller, str(address), None)
        assert found["handshake"].verdict is Severity.OK
        assert found["handshake"].text.endswith(
            f"Not checked which peer it is, because this address does not say; it is\n{there.peer_id}"
        )
        assert found["bandwidth"].verdict is Severity.OK, "all the checks are made with the peer that answers"
        [own] = caller.get_addresses(caller.peer_id)
        failure = only_failure(await examine(caller, str(own), None))
        assert failure.check == "identity"
        assert failure.text.startswith("already online: the peer there has the identity of")
        async with server(web_server) as other:
            assert only_failure(await examine(caller, other, None)).check == "handshake"
        await node.shutdown()


async def test_a_private_address_of_another_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(peer_module, "connect", refuse)
    own = OwnAddresses(lambda: [OwnAddress("203.0.113.7", 1, 24)])
    transport = TcpTransport(Identity.generate(), machine=own)
    p2p = await P2P.create(transport=transport, host_maddrs="0.0.0.0:0", nat_port_map=False)
    failure = only_failure(await examine(p2p, "/ip4/192.168.77.11/tcp/40123", None))
    assert (failure.check, failure.fix) == (
        "connection",
        "192.168.77.11 is a private address of another network: let that machine join this one instead. Start this one "
        "without that address, and give 203.0.113.7:PORT to that machine",
    )
    near = only_failure(await examine(p2p, "/ip4/203.0.113.9/tcp/40123", None))
    assert "private" not in near.fix
    await p2p.shutdown()


async def test_another_peer_answers() -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        [address] = there.get_addresses(there.peer_id)
        failure = only_failure(await examine(caller, str(address), STRANGER))
        assert failure.check == "identity"
        assert str(there.peer_id) in failure.text


async def test_the_own_identity_is_online_elsewhere(tmp_path: Path) -> None:
    async with Peers("tcp") as peers:
        witness = await peers.start()
        path, [address] = tmp_path / "id", await witness.get_visible_maddrs()
        first = await peers.start(initial_peers=[address], identity_path=path)
        await Checkup.get_stub(first, witness.peer_id).rpc_describe(peer_module.Question())
        second = await peers.start(identity_path=path)
        [where] = witness.get_addresses(witness.peer_id)
        failure = (await examine(second, str(where), witness.peer_id, keeps_identity=True))["identity"]
        assert failure.verdict is Severity.FAIL
        assert "already taken by another peer" in failure.text
        [own] = first.get_addresses(first.peer_id)
        failure = only_failure(await examine(second, str(own), first.peer_id, keeps_identity=True))
        assert "already online" in failure.text
        third = await peers.start(identity_path=tmp_path / "other")
        found = await examine(third, str(where), witness.peer_id, keeps_identity=True)
        assert found["identity"].verdict is Severity.OK


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-100.0, "off by 100.0 s: this machine is ahead of"), (2.0, "off by 2.0 s: this machine is behind")],
)
async def test_the_clock_there_is_another(seconds: float, words: str) -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        hello = there.hello

        def greet_wrongly() -> Any:
            greeting = hello()
            greeting.time += seconds
            return greeting

        there.hello = greet_wrongly
        [address] = there.get_addresses(there.peer_id)
        caller.clock = SwarmClock()
        found = (await examine(caller, str(address), there.peer_id))["clock"]
        assert found.verdict is Severity.WARN
        assert words in found.text
        assert "NTP" in found.fix


async def test_another_version_there(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = peer_module.describe_software

    def newer() -> Any:
        found = describe()
        found.shoal = "99.0"
        return found

    monkeypatch.setattr(peer_module, "describe_software", newer)
    found = (await examine_each_other())["versions"]
    assert found.verdict is Severity.WARN
    assert "99.0" in found.text


async def test_a_peer_without_these_checks() -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        there.remove_handlers([name for name in there.server.handlers if name.startswith("Checkup")])
        [address] = there.get_addresses(there.peer_id)
        found = await examine(caller, str(address), there.peer_id)
        assert found["versions"].verdict is Severity.WARN
        assert "too old" in found["versions"].text


async def test_peer_without_a_dht_node() -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        [address] = there.get_addresses(there.peer_id)
        failure = only_failure(await examine(caller, str(address), there.peer_id))
        assert failure.check == "table"
        assert "no handler" in failure.text


async def test_a_table_for_members_only() -> None:
    async with Peers("tcp") as peers:
        there, caller = await peers.two()
        node = await DHTNode.create(p2p=there, authorizer=Member(Authority()))
        [address] = there.get_addresses(there.peer_id)
        found = (await examine(caller, str(address), there.peer_id))["table"]
        assert found.verdict is Severity.WARN
        assert "members only" in found.fix
        await node.shutdown()


async def test_a_slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "SLOW_MEGABITS", 1e9)
    found = (await examine_each_other())["bandwidth"]
    assert found.verdict is Severity.WARN
    assert "compress" in found.fix


# --- the command ------------------------------------------------------------------------------------------------------


@contextmanager
def running_peer(*options: str) -> Iterator[str]:
    """The address of a real ``shoal dht``."""
    command = [sys.executable, "-m", "shoal.cli", "dht", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if line.startswith("  /"))
    finally:
        process.kill()
        process.communicate()


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal.cli", "doctor", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_the_command_with_a_real_peer() -> None:
    with running_peer() as address:
        done = doctor("--", address)
        assert (done.returncode, done.stderr) == (0, "")
        assert max(map(len, done.stdout.splitlines())) <= 80
        for check in (
            "versions",
            "listening",
            "handshake",
            "round trip",
            "dial back",
            "bandwidth",
            "circuit",
            "reachable",
        ):
            assert f"  {check} " in done.stdout
        assert address.rpartition("/")[2] in done.stdout
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
        done = doctor("--json", "--", address, dead)
        assert done.returncode == 1
        found = json.loads(done.stdout)
        assert found["ok"] is False
        about = {each["about"] for each in found["findings"]}
        assert about == {THIS_MACHINE, address, dead, SEEN_BY_OTHERS}
        [failure] = [each for each in found["findings"] if each["verdict"] == "fail"]
        assert (failure["about"], failure["check"]) == (dead, "connection")
        assert failure["fix"]


def test_the_command_without_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("This machine\n  ok       versions ")
    assert "  warn     listening      /ip4/127.0.0.1/tcp/" in out
    assert "  unknown  reachable      " in out
    assert out.endswith("1 warning: see the lines with an arrow.\n")


def test_taken_port_and_unusable_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, running_peer() as address:
        here = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        path = tmp_path / "no" / "id"
        status = main(["doctor", "--json", "--host-maddrs", here, "--identity-path", str(path), "--", address])
        assert status == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [each["check"] for each in findings if each["verdict"] == "fail"] == ["identity file", "listening"]
    assert "is in use" in next(each["text"] for each in findings if each["check"] == "listening")
    assert "bandwidth" in {each["check"] for each in findings}, "other peers are examined all the same"


@pytest.mark.timeout(240)
@pytest.mark.slow_drill
def test_the_cpu_passes_the_device_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--device", "cpu"]) == 0
    findings = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["about"] == "device cpu"]
    assert [each["check"] for each in findings] == ["training", "newcomer", "offload", "CPU sums", "side stream"]
    assert {each["verdict"] for each in findings} == {"ok"}


@pytest.mark.parametrize("name", ["quantum", "meta", "cpu:7", "xpu:99"])
def test_a_device_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", name]) == 2
    assert f"there is no device '{name}' here: available are cpu" in capsys.readouterr().err


def test_the_command_with_a_short_address() -> None:
    with running_peer() as address:
        place = Multiaddr(address)
        short = f"127.0.0.1:{place['tcp']}"
        done = doctor("--", f"'{short}',")
        assert (done.returncode, done.stderr) == (0, "")
        assert f"\nThe peer at {short}\n  ok       connection " in done.stdout
        assert place["p2p"] in done.stdout
        assert "  circuit " in done.stdout


def test_the_command_looks_around(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zeroconf")
    monkeypatch.setattr("shoal.p2p.local_network.SERVICE", f"_d{os.getpid()}._tcp.local.")
    hosts = ["--host-maddrs", "127.0.0.1:0"]
    assert main(["doctor", "local", *hosts]) == 0
    assert "  warn     local network  no peer is announced\n" in capsys.readouterr().out
    monkeypatch.setattr("shoal.dht.joining.FIRST_SECONDS", 0.0)
    with DHT("local", start=True) as there:
        assert main(["doctor", "local", *hosts]) == 0
        out = capsys.readouterr().out
        assert "  ok       local network  1 peer found\n" in out
        assert f"\nPeer {there.peer_id}\n  at /ip4/127.0.0.1/tcp/" in out
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    assert main(["doctor", "local", *hosts]) == 1
    assert "-> pip install 'shoal[local]'" in capsys.readouterr().out


def test_malformed_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "127.0.0.1"]) == 2
    assert "'127.0.0.1' is no address of a peer: its port is missing" in capsys.readouterr().err


def test_ctrl_c_ends_it_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
        command = [sys.executable, "-m", "shoal.cli", "doctor", "--client-mode", address]
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also if started in the background
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
        try:
            assert process.stdout is not None
            assert any("connection" in line for line in process.stdout)  # now it waits for TLS
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, errors) == (130, "Stopped.\n")
