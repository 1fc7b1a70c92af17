"""``shoal monitor`` as a user sees it: a process that watches a run of real peers, and leaves when asked to."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.access.badges import Roles
from shoal.access.tokens import Token
from shoal.cli.__main__ import main
from shoal.cli.demo.command import show_page
from shoal.cli.demo.messages import RUN_ID
from shoal.cli.monitor import serve_to_prometheus, start_page
from shoal.monitor import observer
from shoal.monitor.observer import Monitor
from shoal.monitor.run import RunView
from shoal.optim.diloco.diloco import DiLoCo
from shoal.optim.progress.run_list import KEY
from shoal.p2p import Identity
from tests.optim.conftest import wait_until

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def training(run_id: str, token: str = "") -> Iterator[shoal.DHT]:
    """A peer of this process that trains in the background, and reports; its DHT."""
    ended = threading.Event()
    with shoal.DHT(start=True, token=token) as dht:
        model = torch.nn.Linear(2, 1)
        opt = shoal.Optimizer(
            dht=dht,
            run_id=run_id,
            target_batch_size=32,
            batch_size_per_step=8,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            matchmaking_time=1.0,
        )

        def train() -> None:
            while not ended.wait(0.2):
                opt.zero_grad()
                loss = model(torch.ones(8, 2)).square().mean()
                loss.backward()
                opt.step()
                opt.report(loss=loss, answer=42)

        thread = threading.Thread(target=train)
        with opt:
            thread.start()
            try:
                yield dht
            finally:
                ended.set()
                thread.join()


def ask(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def first_event(url: str) -> dict:
    with urllib.request.urlopen(url + "events", timeout=60) as stream:
        return json.loads(stream.readline()[6:])


def test_monitor_role_can_watch_a_private_run(tmp_path):
    key = Token.new_run("secret")
    guest = key.invite(Roles.MONITOR, 32_000_000_000)
    with training("my_run", token=key.text) as dht:
        address = str(dht.get_visible_maddrs()[0])
        command = [sys.executable, "-m", "shoal.cli", "monitor", address, "--run", "my_run", "--token", guest.text]
        folder = tmp_path / "events"
        options = ["--web", "0", "--tensorboard", str(folder), "--prometheus", "0", "--goal-epochs", "50"]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            found: dict[str, str] = {}
            for line in process.stdout:
                if match := re.search(r"(Watch my_run at|For Prometheus:) (http://127.0.0.1:\d+/\S*)", line):
                    found[match[1]] = match[2]
                if re.search(r"my_run: epoch \d+ of 50  \|  1 peer .*answer 42 .* of 32 samples in the last", line):
                    break
            else:
                pytest.fail(f"it never saw the peer: {process.communicate()[1]}")
            content = first_event(found["Watch my_run at"])
            assert [row[0] for row in content["rows"]] == [str(dht.peer_id)]
            assert (content["summary"]["batch"], content["summary"]["target"]) == (32, 32)
            assert content["summary"]["goal"] == 50
            assert "shoal_swarm_peers" in ask(found["For Prometheus:"])
            assert len(dht.node.protocol.routing_table) == 0, "it is no node of the table"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")
            assert list(folder.iterdir())
        finally:
            process.kill()
            process.communicate()


def test_mistyped_run_lists_the_existing_runs(monkeypatch):
    monkeypatch.setattr(observer, "SECONDS_BEFORE_HELP", 0.0)
    with training("digits") as dht, shoal.DHT(dht.get_visible_maddrs(), start=True, client_mode=True) as watching:
        wait_until(lambda: watching.get(KEY, latest=True), "the run is listed")
        with Monitor(watching, "digit") as monitor:
            wait_until(lambda: monitor.view.events.since(), "the user is told something")
            [event] = monitor.view.events.since()
            assert event.text == "1 peer here trains 'digits', none 'digit'. Check --run; private runs are not listed"


def test_it_says_what_is_missing(capsys):
    assert main(["monitor", "--run", "run"]) == 1
    assert "give the address of at least one peer" in capsys.readouterr().err
    nobody = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    assert main(["monitor", nobody, "--run", "run"]) == 1
    assert "shoal doctor" in capsys.readouterr().err


def test_the_usual_port_may_be_taken():
    view = RunView("run")
    with contextlib.closing(start_page(view, 0)) as first:
        port = int(first.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(OSError, match="--web 0"):
            start_page(view, port)
        with contextlib.closing(start_page(view, port, is_chosen=False)) as other:
            assert other.url != first.url
        with pytest.raises(OSError, match=rf"Prometheus cannot be served at port {port} \(.*\): choose another"):
            serve_to_prometheus(view, port)
    with pytest.raises(OSError, match="give --web-host an address of this machine"):
        start_page(view, 0, "203.0.113.9")


def test_the_page_needs_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "shoal.monitor.page", None)
    with pytest.raises(ModuleNotFoundError, match=r"shoal\[monitor\]"):
        start_page(RunView("run"), 0)


def test_the_demo_shows_itself():
    with training(RUN_ID) as dht, contextlib.ExitStack() as stack:
        url = show_page([str(address) for address in dht.get_visible_maddrs()], 0, stack)
        wait_until(lambda: first_event(url)["rows"], "the page shows the peer")


def test_a_peer_that_exchanges_little_reports_too():
    parameter = torch.nn.Parameter(torch.zeros(1))
    with shoal.DHT(start=True) as dht:
        options = {"sync_every": 2, "batch_size_per_step": 4, "matchmaking_time": 1.0}
        inner = torch.optim.SGD([parameter], lr=0.1)
        with DiLoCo(dht=dht, run_id="run", optimizer=inner, **options) as opt, Monitor(dht, "run") as monitor:
            for _ in range(6):
                parameter.grad = torch.ones(1)
                opt.step()
            opt.report(loss=1.5)
            wait_until(lambda: monitor.view.summary and monitor.view.summary.reporting, "the report is seen")
            (peer,) = monitor.view.peers.values()
            assert peer.report is not None
            assert (peer.report.samples, peer.report.metrics, peer.report.epoch) == (24, {"loss": 1.5}, 3)
            assert (peer.report.step_samples, peer.report.step_target) == (8, 0)
            monitor.check()
        assert not monitor.is_alive()
