"""Two machines as a new user has them: what is printed on one of them works on the other one."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.hosts import NEEDS_HOSTS, Host, Network
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [pytest.mark.xdist_group("hosts"), NEEDS_HOSTS, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
LIMIT = 120
"""Seconds, on a machine that does other things, too."""
ADDRESS = r"/ip[46]/\S+/tcp/\d+/p2p/\w+"
_numbers = itertools.count()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with Network(2) as network:
        yield network.hosts


def ask(peer: Peer, *words: object) -> Any:
    """Tell a ``keep_in_touch.py`` to do something; returns what came of it."""
    number = next(_numbers)
    peer.tell(json.dumps([number, *words]))
    return peer.wait_for("result", LIMIT, lambda event: event["number"] == number)["result"]


def start_seed(host: Host, *options: str) -> tuple[Peer, list[str]]:
    """``shoal dht``, and the addresses that it prints."""
    seed = host.start("-m", "shoal.cli", "dht", *options)
    seed.wait_for_line("^Others join with:", START_LIMIT_SECONDS)
    printed = [match[1] for event in seed.all("line") if (match := re.match(f"^  ({ADDRESS})$", event["line"]))]
    return seed, printed


def test_every_printed_address_works(hosts: list[Host]) -> None:
    here, there = hosts
    seed, printed = start_seed(here)
    best = seed.wait_for_line(f"shoal dht --initial-peers ({ADDRESS})$", LIMIT)[1]
    assert best.startswith(f"/ip4/{here.address}/")
    assert printed[0] == best
    assert [each.split("/")[2] for each in printed] == [here.address, here.address_6, "127.0.0.1"]
    first = here.start("keep_in_touch.py", best)
    others = [there.start("keep_in_touch.py", address) for address in (best, printed[1])]
    for peer in others:
        peer.wait_for("addresses", START_LIMIT_SECONDS)
    assert ask(others[0], "store", "key", "value")
    for peer in (first, *others):
        assert ask(peer, "get", "key") == "value"
    pasted = there.start("keep_in_touch.py", *printed)
    assert pasted.wait_for("addresses", START_LIMIT_SECONDS)["addresses"][0].startswith(f"/ip4/{there.address}/")


def test_printed_address_survives_a_restart(hosts: list[Host]) -> None:
    here, there = hosts
    seed, printed = start_seed(here)
    seed.process.send_signal(signal.SIGKILL)
    seed.wait(LIMIT)
    again, printed_again = start_seed(here)
    assert printed_again == printed
    again.wait_for_line(f"kept in {re.escape(str(here.home))}/state/shoal/dht/default$", LIMIT)
    assert there.start("keep_in_touch.py", printed[0]).wait_for("addresses", START_LIMIT_SECONDS)


def test_printed_short_line_works_elsewhere(hosts: list[Host]) -> None:
    here, there = hosts
    seed, _ = start_seed(here)
    short = f"{here.address}:31337"
    assert seed.wait_for_line(r"^  (\S+:\d+)$", LIMIT)[1] == short
    assert there.start("keep_in_touch.py", f"'{short}',\n").wait_for("addresses", START_LIMIT_SECONDS)


def test_local_machines_find_each_other_without_addresses(hosts: list[Host]) -> None:
    """In any order; one that was alone joins when another one appears, and one that has moved is found again."""
    pytest.importorskip("zeroconf")
    here, there = hosts
    first = here.start("keep_in_touch.py", "local")
    first.wait_for("addresses", START_LIMIT_SECONDS)
    seed = there.start("-m", "shoal.cli", "dht", "local", "--refresh-period", "1")
    seed.wait_for_line(r"^2 DHT nodes \(including this one\)", LIMIT)
    assert ask(first, "store", "key", "value")
    beside = here.start("keep_in_touch.py", "local")
    beside.wait_for("addresses", START_LIMIT_SECONDS)
    assert ask(beside, "get", "key") == "value"
    seed.process.send_signal(signal.SIGKILL)
    seed.wait(LIMIT)
    there.set_address(77)
    again = there.start("keep_in_touch.py", "local")
    assert again.wait_for("addresses", START_LIMIT_SECONDS)["addresses"][0].startswith("/ip4/10.88.0.77/")
    assert ask(again, "get", "key") == "value"


DEAF = {"SHOAL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0"}


def test_loopback_peer_is_called_through_the_seed(hosts: list[Host]) -> None:
    here, there = hosts
    first = here.start("keep_in_touch.py")
    [address, *_] = first.wait_for("addresses", START_LIMIT_SECONDS)["addresses"]
    deaf = there.start("keep_in_touch.py", address, environment=DEAF)
    own = deaf.wait_for("addresses", START_LIMIT_SECONDS)["addresses"]
    assert f"{address}/p2p-circuit" in [each.rpartition("/p2p/")[0] for each in own]


def test_loopback_peer_without_relay_is_told_the_fix(hosts: list[Host]) -> None:
    here, there = hosts
    first = here.start("keep_in_touch.py")
    [address, *_] = first.wait_for("addresses", START_LIMIT_SECONDS)["addresses"]
    program = "import shoal, sys; shoal.DHT(sys.argv[1:], force_reachability='public', start=True)"
    deaf = there.start("-c", program, address, environment=DEAF)
    assert deaf.wait(START_LIMIT_SECONDS) != 0
    for words in ("which is this machine alone", "host_maddrs=", "SHOAL_HOST_MADDRS", "`shoal dht`"):
        assert words in deaf.errors()


TRAIN = """
import logging, sys, time, torch, shoal
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
dht = shoal.DHT(sys.argv[1:], start=True)
model = torch.nn.Linear(2, 1)
opt = shoal.Optimizer(dht=dht, run_id="my_run", target_batch_size=64, batch_size_per_step=16,
                      optimizer=torch.optim.SGD(model.parameters(), lr=0.1), matchmaking_time=1.0,
                      averaging_timeout=3.0, average_state_every=10**6)
print("at", dht.get_visible_maddrs()[0], flush=True)
while True:
    model(torch.ones(16, 2)).mean().backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.1)
"""


@pytest.mark.slow_drill
def test_unreachable_pair_warns_once(hosts: list[Host]) -> None:
    here, there = hosts
    _, [address, *_] = start_seed(here)
    deaf = here.start("-c", TRAIN, address, environment=DEAF)
    own = deaf.wait_for_line(f"at ({ADDRESS})", START_LIMIT_SECONDS)[1]
    assert own.startswith("/ip4/127.0.0.1/"), "it joins through a seed on its machine, which can call it"
    warned = there.start("-c", TRAIN, address)
    line = warned.wait_for_line("WARNING peer .* cannot call it", LIMIT).string
    for words in (own.rpartition("/")[2], "of run 'my_run'", "listens on its own machine alone", "host_maddrs="):
        assert words in line
    warned.wait_for_line("WARNING .* did not|WARNING .*gradients of epoch|WARNING averaging|at ", LIMIT)
    assert len([1 for event in warned.all("line") if "cannot call it" in event["line"]]) == 1


def test_changed_address_is_announced_anew(hosts: list[Host]) -> None:
    here, there = hosts
    seed = here.start("keep_in_touch.py")
    [address, *_] = seed.wait_for("addresses", START_LIMIT_SECONDS)["addresses"]
    mover = there.start("keep_in_touch.py", address)
    event = mover.wait_for("addresses", START_LIMIT_SECONDS)
    assert event["addresses"][0].startswith(f"/ip4/{there.address}/")
    port = event["addresses"][0].split("/")[4]
    assert ask(mover, "store", "before", 1)
    there.set_address(77)
    assert there.address == "10.88.0.77"
    assert ask(mover, "look")[0].startswith(f"/ip4/{there.address}/tcp/{port}/")  # it looks by itself, but seldom
    deadline = time.monotonic() + LIMIT
    while (found := ask(seed, "where", event["peer_id"]))[0] != f"/ip4/{there.address}/tcp/{port}":
        assert time.monotonic() < deadline, f"the seed would still call {found}"
    assert [each.split("/")[2] for each in found] == [there.address, there.address_6, "127.0.0.1"]
    assert ask(seed, "store", "after", 2)
    assert [ask(mover, "get", key) for key in ("before", "after")] == [1, 2]


# --- the documents ----------------------------------------------------------------------------------------------------


def first_block(document: str) -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.slow_drill
def test_two_laptops_run_the_training_guide(hosts: list[Host]) -> None:
    laptops = []
    addresses: list[str] = []
    for host in hosts:
        laptop = host.start("-c", first_block("docs/training.md"), *addresses)
        printed = laptop.wait_for_line("^others join with: (.*)", START_LIMIT_SECONDS)[1]
        addresses = addresses or printed.split()
        assert printed.startswith(f"/ip4/{host.address}/")
        laptops.append(laptop)
    for laptop in laptops:  # it does not take the half minute that it would take alone
        laptop.wait_for_line("^epoch [1-3] peers 2", LIMIT)
        assert laptop.errors() == ""


@pytest.mark.slow_drill
def test_two_computers_run_the_readme_s_program(hosts: list[Host]) -> None:
    program = first_block("README.md")
    assert "initial_peers=[]" in program
    first = hosts[0].start("-c", program)
    address = first.wait_for_line(r"(/ip4/\S+/p2p/\w+)", START_LIMIT_SECONDS)[1]
    assert address.startswith(f"/ip4/{hosts[0].address}/")
    first.process.send_signal(signal.SIGSTOP)  # it must not be done while the other one is still importing
    second = hosts[1].start("-c", program.replace("initial_peers=[]", f"initial_peers=[{address!r}]"))
    while not has_connected(second):
        assert second.process.poll() is None, second.errors()
        time.sleep(0.01)
    first.process.send_signal(signal.SIGCONT)
    for peer in (first, second):
        assert peer.wait(LIMIT) == 0
        # The program ends when its training does, and one is the first.
        told = {line.partition(" WARNING shoal: ")[2] for line in peer.errors().splitlines()}
        assert told <= {"parameters were not averaged in epoch 10: the others have left or continued"}


@pytest.mark.slow_drill
def test_two_computers_run_the_quickstart_together(hosts: list[Host]) -> None:
    first = hosts[0].start(ROOT / "examples/quickstart.py")
    command = first.wait_for_line("^Others join with: (.*)", START_LIMIT_SECONDS)[1]
    python, program, *arguments = shlex.split(command)
    assert (python, program) == ("python", "examples/quickstart.py")
    second = hosts[1].start(ROOT / program, *arguments)
    for peer in (first, second):
        peer.wait_for_line("^\\d+ s: .*peers: 2", LIMIT)


@pytest.mark.slow_drill
def test_two_computers_run_the_lightning_example_together(hosts: list[Host]) -> None:
    pytest.importorskip("lightning")
    first = hosts[0].start(ROOT / "examples/lightning_digits.py")
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while not (line := re.search(r"^ +PL_INITIAL_PEERS=(\S+) python (\S+)$", first.errors(), re.MULTILINE)):
        assert time.monotonic() < deadline, first.errors()
        time.sleep(0.05)  # it writes to a file, which tells nobody
    assert line[1].startswith(f"{hosts[0].address}:")
    first.process.send_signal(signal.SIGSTOP)  # it must not be done while the other one is still importing
    second = hosts[1].start(line[2], environment={"PL_INITIAL_PEERS": line[1]})
    while not has_connected(second):
        assert second.process.poll() is None, second.errors()
        time.sleep(0.01)
    first.process.send_signal(signal.SIGCONT)
    metrics = hosts[1].home / "lightning_logs" / "version_0" / "metrics.csv"
    while not (metrics.exists() and "2" in whole_numbers("peers", metrics)):
        assert second.process.poll() is None or "2" in whole_numbers("peers", metrics), second.errors()
        time.sleep(0.05)


def has_connected(peer: Peer) -> bool:
    """Somebody on its host has a connection; psutil would look at those of this process's own host."""
    rows = Path(f"/proc/{peer.process.pid}/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
    return any(row.split()[3] == "01" for row in rows)


def whole_numbers(name: str, table: Path) -> set[str]:
    """What is in a column of what Lightning logs."""
    with table.open(encoding="utf-8") as file:
        return {row[name].partition(".")[0] for row in csv.DictReader(file) if row.get(name)}


def test_two_computers_run_the_code_of_the_guides(hosts: list[Host]) -> None:
    peers: list[Peer] = []
    addresses: list[str] = []
    for host in hosts:
        peers.append(host.start("run_guides.py", *addresses))
        addresses = peers[-1].wait_for("addresses", START_LIMIT_SECONDS)["addresses"]
    number, count = 0, 1
    while number < count:
        for peer in peers:
            peer.tell("go")
        for peer in peers:
            event = peer.wait_for("block", LIMIT, lambda event, number=number: event["block"] == number)
            assert event["peers"] == 2
        number, count = number + 1, event["of"]
    assert count == 6
    for peer in peers:
        peer.tell("leave")
        assert peer.wait(LIMIT) == 0
