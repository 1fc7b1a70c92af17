"""``shoal dht`` as a user sees it: a process that prints how to join, reports, and leaves when asked to."""

from __future__ import annotations

import asyncio
import contextlib
import io
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

import shoal
from shoal.cli.__main__ import build_parser, hivemind_dht, main
from shoal.cli.dht import FIRST_PORT, how_to_join, qr_code
from shoal.p2p import P2P, Multiaddr
from shoal.p2p.joining import parse_peer_addresses

pytestmark = pytest.mark.timeout(240)
PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
OWN_HOST = str(ipaddress.ip_address("127.1.0.0") + os.getpid() % 2**16)
"""An address of this machine where no other test listens: a kept port stays free there while nobody has it."""
JOIN = re.compile(r"^  shoal dht --initial-peers (/\S+/p2p/\w+)$")
SHORT = re.compile(r"^  (127\.0\.0\.1:\d+)$")
TWO_NODES = re.compile(r"2 DHT nodes \(including this one\) are in the local routing table")


class Bootstrap:
    """A running ``shoal dht``."""

    def __init__(self, *options: str, shell: str = "", state: Path | None = None, without: Sequence[str] = ()) -> None:
        script = f"import sys; sys.modules.update(dict.fromkeys({without!r})); import shoal.cli.__main__ as it; "
        command = [sys.executable, "-c", f"{script}sys.exit(it.main())", "dht", *options]
        own = {"XDG_STATE_HOME": str(state), "SHOAL_HOST_MADDRS": f"/ip4/{OWN_HOST}/tcp/0"} if state else {}
        self.process = subprocess.Popen(
            ["sh", "-c", f'{shell} && exec "$@"', "sh", *command] if shell else command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | own,
        )

    def line_that_matches(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Read on until a line matches; the test's time limit is the limit."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            if match := pattern.match(line.rstrip("\n")):
                return match
            lines.append(line)
        pytest.fail(f"no line like {pattern.pattern} in:\n{''.join(lines)}{self.process.communicate()[1]}")

    def ends(self, number: signal.Signals) -> str:
        """Send a signal, expect a clean and quick end; returns the rest of the output."""
        self.process.send_signal(number)
        out, errors = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, errors
        assert errors == ""
        return out


@contextlib.contextmanager
def bootstrap(*options: str, shell: str = "", without: Sequence[str] = ()) -> Iterator[Bootstrap]:
    """Run it, after a command of the shell if one is given, and as if some packages were not installed."""
    running = Bootstrap("--host-maddrs", "/ip4/127.0.0.1/tcp/0", *options, shell=shell, without=without)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the limits of another process can be read on Linux only")
def test_it_raises_the_limit_of_open_files() -> None:
    with bootstrap(shell="ulimit -S -n 100") as running:
        running.line_that_matches(JOIN)
        process = psutil.Process(running.process.pid)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard or soft >= 2**15
        assert soft > 100
        running.ends(signal.SIGTERM)


@pytest.mark.parametrize(("number", "option"), [(signal.SIGINT, ["--initial_peers"]), (signal.SIGTERM, [])])
def test_printed_address_works_and_both_leave_cleanly(number: signal.Signals, option: Sequence[str]) -> None:
    with bootstrap("--refresh-period", "0.3") as first:
        address = first.line_that_matches(JOIN)[1]
        with bootstrap("--refresh_period", "0.3", *option, address) as second:
            for running in (first, second):
                running.line_that_matches(TWO_NODES)
                running.line_that_matches(re.compile(r"Local storage contains \d+ keys"))
            assert "Leaving." in second.ends(number)
        assert "Leaving." in first.ends(number)


def test_identity_file_keeps_the_address(tmp_path: Path) -> None:
    peers = []
    for _ in range(2):
        with bootstrap("--identity-path", str(tmp_path / "identity.key")) as running:
            address = running.line_that_matches(JOIN)[1]
            peers.append(address.rpartition("/")[2])
            running.ends(signal.SIGTERM)
    assert peers[0] == peers[1]


@pytest.fixture
def named(tmp_path: Path) -> Iterator[Callable[..., Bootstrap]]:
    """Runs it with what it keeps in a folder of this test; it listens on loopback, at an address of its own."""
    started: list[Bootstrap] = []

    def start(*options: str) -> Bootstrap:
        started.append(Bootstrap(*options, state=tmp_path))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the folder is another one elsewhere")
KEPT = re.compile(r"^Key and port stay the same at the next start: they are kept in (/.+)$")


@ON_LINUX
def test_named_peer_keeps_its_address(named: Callable[..., Bootstrap], tmp_path: Path) -> None:
    addresses = []
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        running = named("--name", "seed")
        addresses.append(running.line_that_matches(JOIN)[1])
        assert running.line_that_matches(KEPT)[1] == str(tmp_path / "shoal" / "dht" / "seed")
        running.process.send_signal(number)
        running.process.wait(120)
    assert len(set(addresses)) == 1
    other = named("--name", "seed-2").line_that_matches(JOIN)[1]
    assert Multiaddr(other)["p2p"] != Multiaddr(addresses[0])["p2p"]


@ON_LINUX
def test_two_cannot_have_one_name(named: Callable[..., Bootstrap]) -> None:
    first = named("--name", "seed")
    first.line_that_matches(JOIN)
    second = named("--name", "seed")
    out, errors = second.process.communicate(timeout=120)
    assert second.process.returncode == 1
    assert out == ""
    for words in ("named 'seed' is running", f"process {first.process.pid}", "--name ANOTHER_NAME", "--ephemeral"):
        assert words in errors
    assert first.process.poll() is None


@ON_LINUX
def test_a_kept_port_that_somebody_else_has_now(named: Callable[..., Bootstrap]) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", FIRST_PORT)))
        running = named("--name", "seed")
        port = int(str(Multiaddr(running.line_that_matches(JOIN)[1])["tcp"]))
    assert port != FIRST_PORT
    running.ends(signal.SIGTERM)
    with socket.create_server((OWN_HOST, port)):
        out, errors = named("--name", "seed").process.communicate(timeout=120)
    assert out == ""
    assert f"cannot listen on /ip4/{OWN_HOST}/tcp/{port}: port {port} is in use: is an earlier run still" in errors
    assert "It is the port of the last time" in errors
    assert "--host-maddrs" in errors
    assert named("--name", "seed").line_that_matches(JOIN)[1].split("/")[4] == str(port), "it comes back to it"


@ON_LINUX
def test_nothing_is_kept_of_an_ephemeral_peer(named: Callable[..., Bootstrap], tmp_path: Path) -> None:
    peers = set()
    for options in (["--ephemeral"], ["--ephemeral"], ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]):
        running = named(*options)
        peers.add(Multiaddr(running.line_that_matches(JOIN)[1])["p2p"])
        running.line_that_matches(re.compile("^The next start will have another address; for one that stays, "))
        running.ends(signal.SIGTERM)
    assert len(peers) == 3
    assert list(tmp_path.iterdir()) == []


@ON_LINUX
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--name", "../seed"], "must be a plain word"),
        (["--name", "seed", "--ephemeral"], "exclude each other"),
    ],
)
def test_names_that_make_no_sense(named: Callable[..., Bootstrap], options: Sequence[str], words: str) -> None:
    running = named(*options)
    assert words in running.process.communicate(timeout=120)[1]
    assert running.process.returncode == 1


@ON_LINUX
def test_given_port_or_key_keeps_the_rest(named: Callable[..., Bootstrap], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for options in (
        ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"],
        ["--identity-path", str(tmp_path / "key"), "--name", "other"],
    ):
        found = set()
        for _ in range(2):
            running = named(*options)
            found.add(running.line_that_matches(JOIN)[1])
            running.ends(signal.SIGTERM)
        assert len(found) == 1


def test_announced_address_is_what_others_are_told() -> None:
    with bootstrap("--announce-maddrs", "/ip4/203.0.113.7/tcp/31337") as running:
        assert running.line_that_matches(JOIN)[1].startswith("/ip4/203.0.113.7/tcp/31337/p2p/")
        running.ends(signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--refresh-period", "5", "nonsense"], "nonsense"),
        (["--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"], f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"),
        (["--announce-maddrs", "/ip4/203.0.113.7/tcp/0"], "/ip4/203.0.113.7/tcp/0"),
        (["--identity-path", "no/such/folder/identity.key"], "no/such/folder"),
    ],
    ids=["no address", "nobody there", "port 0", "no folder"],
)
def test_what_cannot_work_is_said_in_one_message(
    request: pytest.FixtureRequest, options: Sequence[str], words: str
) -> None:
    with bootstrap(*options) as running:
        out, errors = running.process.communicate(timeout=120)
    assert running.process.returncode == 1
    assert words in errors
    assert ("shoal doctor" in errors) == ("nobody there" in request.node.name)
    assert "Traceback" not in errors
    assert out == ""


def test_the_address_that_reaches_furthest_comes_first() -> None:
    addresses = [
        Multiaddr(f"{host}/tcp/1/p2p/{PEER}") for host in ("/ip4/127.0.0.1", "/ip4/192.168.1.5", "/ip4/8.8.8.8")
    ]
    lines = how_to_join(addresses)
    assert [line.split("/")[2] for line in lines if line.startswith("  /")] == ["8.8.8.8", "192.168.1.5", "127.0.0.1"]
    assert f"  shoal dht --initial-peers {addresses[2]}" in lines


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (["/ip4/127.0.0.1", "/ip4/192.168.1.5", "/ip4/8.8.8.8"], "8.8.8.8:1"),
        (["/ip4/127.0.0.1", "/ip4/192.168.1.5"], "192.168.1.5:1"),
        (["/ip4/127.0.0.1"], "127.0.0.1:1"),
        (["/ip6/::1", "/ip6/2001:4860::8"], "[2001:4860::8]:1"),
        (["/ip4/192.168.1.5", "/dns/example.org"], "example.org:1"),
    ],
)
def test_line_to_paste_is_short(hosts: list[str], line: str) -> None:
    lines = how_to_join([Multiaddr(f"{host}/tcp/1/p2p/{PEER}") for host in hosts])
    assert lines[:2] == ["This peer is running. Give this address to the others:", f"  {line}"]


def test_relayed_peer_has_no_short_line() -> None:
    address = Multiaddr(f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER[:-1]}q")
    assert how_to_join([address])[1] == f"  {address}"


def test_without_torch_others_join_by_the_short_line() -> None:
    """As on a rented machine, where neither torch nor numpy is installed."""
    absent = ("torch", "numpy")
    with bootstrap("--refresh-period", "0.3", without=absent) as first:
        address = first.line_that_matches(SHORT)[1]
        peer = first.line_that_matches(JOIN)[1].rpartition("/")[2]
        with bootstrap("--refresh-period", "0.3", f"'{address}',", without=absent) as second:
            met = second.line_that_matches(re.compile(rf"^Peer (\w+) answered at {re.escape(address)}\. "))
            assert met[1] == peer
            for running in (first, second):
                running.line_that_matches(TWO_NODES)
            second.ends(signal.SIGTERM)
        first.ends(signal.SIGTERM)


@pytest.mark.parametrize(
    "words",
    [
        ["monitor", "127.0.0.1:1", "--run", "x"],
        ["archive", "127.0.0.1:1", "folder", "--run", "x"],
        ["revive", "folder"],
        ["demo", "--peers", "2"],
        ["doctor", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_without_torch_other_commands_say_what_is_missing(words: Sequence[str], tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; import shoal.cli.__main__ as it; sys.exit(it.main())"
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"shoal {words[0]}: this part of shoal needs torch, which is not installed: run pip install")


def test_a_qr_code_of_the_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    segno = pytest.importorskip("segno")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    dark = {"█": (0, 0), "▀": (0, 1), "▄": (1, 0), " ": (1, 1)}
    rows = [[dark[sign][half] for sign in line] for line in qr_code("203.0.113.7:31337") for half in (0, 1)]
    wanted = [list(row) for row in segno.make("203.0.113.7:31337", micro=False).matrix_iter(border=4)]
    assert rows[: len(wanted)] == wanted


def test_the_qr_code_is_shown_on_request() -> None:
    pytest.importorskip("segno")
    with bootstrap("--ephemeral", "--qr") as running:
        running.line_that_matches(SHORT)
        running.line_that_matches(re.compile("^(█|\x1b\\[7m )"))
        running.line_that_matches(re.compile("^The next start will have another address"))
        running.ends(signal.SIGTERM)


def test_qr_code_without_block_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("segno")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert "".join(qr_code("203.0.113.7:31337")).isascii()


def test_missing_qr_package_is_reported_before_the_start() -> None:
    with bootstrap("--qr", without=["segno"]) as running:
        out, errors = running.process.communicate(timeout=120)
    assert out == ""
    assert "--qr needs segno, which is not installed: pip install 'shoal[qr]'" in errors
    with bootstrap("--initial-peers", "local", without=["zeroconf"]) as running:
        out, errors = running.process.communicate(timeout=120)
    assert out == ""
    assert "initial_peers='local' needs zeroconf, which is not installed: pip install 'shoal[local]'" in errors


def test_it_reports_what_it_carries() -> None:
    with bootstrap("--refresh-period", "0.3") as running:
        address = running.line_that_matches(JOIN)[1]
        running.line_that_matches(re.compile(r"Relay for 0 peers: 0 circuits, 0\.0 MB carried since the last report"))

        async def be_a_guest() -> None:
            guest = await P2P.create([address], client_mode=True)
            try:
                guest.reservations.trusted = parse_peer_addresses([address])
                guest.reservations.want(True)
                async with asyncio.timeout(60):
                    line = re.compile(r"Relay for 1 peer: 0 circuits, ")
                    await asyncio.to_thread(running.line_that_matches, line)
            finally:
                await guest.shutdown()

        asyncio.run(be_a_guest())
        running.ends(signal.SIGTERM)
    with bootstrap("--refresh-period", "0.3", "--no-relay") as running:
        running.line_that_matches(re.compile("No relay for others"))
        running.ends(signal.SIGTERM)


@pytest.mark.parametrize("options", [["--use_ipfs"], ["--use-ipfs"]])
def test_options_without_effect_are_accepted(options: Sequence[str]) -> None:
    with bootstrap(*options) as running:
        running.line_that_matches(JOIN)
        running.process.send_signal(signal.SIGTERM)
        _, errors = running.process.communicate(timeout=30)
    assert running.process.returncode == 0
    assert errors == f"shoal dht: no effect here: {', '.join(options).replace('_', '-')}\n"


def test_both_spellings_are_one_option() -> None:
    parse = build_parser().parse_args
    names = {
        "initial-peers": ["a", "b"],
        "host-maddrs": ["c"],
        "announce-maddrs": ["d"],
        "identity-path": Path("e"),
        "refresh-period": 5.0,
    }
    defaults = vars(parse(["dht"]))
    assert defaults["host_maddrs"] is None
    assert defaults["refresh_period"] == 30
    assert defaults["addresses"] == []
    for words in (["a", "b", "--refresh-period", "5"], ["--refresh-period", "5", "a", "b"]):
        assert vars(parse(["dht", *words])) == {**defaults, "addresses": ["a", "b"], "refresh_period": 5.0}
    for name, value in names.items():
        words = [str(each) for each in value] if isinstance(value, list) else [str(value)]
        for spelling in (name, name.replace("-", "_")):
            expected = {**defaults, name.replace("-", "_"): value}
            assert vars(parse(["dht", f"--{spelling}", *words])) == expected


def test_broken_pipe_ends_it_quietly() -> None:
    """As in ``shoal dht | head``."""
    with bootstrap("--refresh-period", "0.1") as running:
        running.line_that_matches(JOIN)
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.wait(60) == 1
        assert running.process.stderr is not None
        assert running.process.stderr.read() == ""


def test_unencodable_output_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    running = Bootstrap("--name", "seed", state=tmp_path / "zustände")
    try:
        running.line_that_matches(re.compile(r"^Key and port stay the same .*zust\?nde"))
        running.ends(signal.SIGTERM)
    finally:
        running.process.kill()
        running.process.communicate()


def test_the_name_that_older_scripts_know(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hivemind-dht", "--refresh_period", "0"])
    with pytest.raises(SystemExit, match="2"):
        hivemind_dht()
    assert "positive number of seconds, got 0" in capsys.readouterr().err
    scripts = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'hivemind-dht = "{hivemind_dht.__module__}:{hivemind_dht.__name__}"' in scripts


def test_scripts_read_the_addresses_from_stderr() -> None:
    def run(*options: str) -> subprocess.Popen[str]:
        call = "import sys; from shoal.cli.__main__ import hivemind_dht; sys.exit(hivemind_dht())"
        command = [sys.executable, "-c", call, "--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--refresh_period", "0.3"]
        return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(pattern, line):
                return match
        pytest.fail(f"it ended without a line like {pattern}")

    started: list[subprocess.Popen[str]] = []
    try:
        started.append(first := run())
        assert first.stderr is not None
        line = first.stderr.readline()
        words = "Running a DHT instance. To connect other peers to this one, use --initial_peers "
        assert line.startswith(words)
        addresses = line.removeprefix(words).split()
        assert [Multiaddr(address)["ip4"] for address in addresses] == ["127.0.0.1"]
        assert all("/p2p/" in address for address in addresses)
        assert read_until(first, "Full list of visible multiaddresses: (.+)")[1].split() == addresses
        started.append(second := run("--initial_peers", *addresses))
        for process in started:
            read_until(process, TWO_NODES.pattern)
            read_until(process, r"Local storage contains \d+ keys")
        for process in (second, first):
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_the_command_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    for command in ("demo", "dht", "doctor"):
        assert f"\n    {command} " in shown
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"shoal {shoal.__version__}\n"
