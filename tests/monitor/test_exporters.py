"""Figures of a run for TensorBoard, Weights & Biases and Prometheus: read back as those programs would."""

from __future__ import annotations

import http.client
import os
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import msgspec
import pytest

from shoal import metrics
from shoal.errors import ShoalError
from shoal.metrics import Metrics, samples_of, serve_prometheus
from shoal.monitor.exporters import Prometheus, TensorBoard, Wandb, figures_of
from shoal.monitor.run import RunView
from tests.monitor.listening import can_listen
from tests.monitor.made_up import MadeUpRun

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made_up() -> MadeUpRun:
    run = MadeUpRun(RunView("run"), 3)
    run.pass_second()
    return run


def ask(url: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def test_figures_have_names_and_are_finite(made_up):
    figures = figures_of(made_up.view.summary)
    assert figures["swarm/peers"] == 3
    assert {"mean/loss", "median/accuracy", "swarm/throughput", "swarm/step"} <= figures.keys()
    assert "swarm/loss" not in figures
    empty = RunView("run")
    assert "swarm/step" not in figures_of(empty.tick(0.0))


def test_tensorboard_gets_one_point_for_each_epoch(made_up, tmp_path: Path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    exporter = TensorBoard(str(tmp_path))
    for _ in range(40):
        made_up.pass_second()
        exporter.note(made_up.view)
    exporter.close()
    (file,) = tmp_path.iterdir()
    data, points = file.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        points += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    assert [step for step, tag, _ in points if tag == "swarm/peers"] == [0, 1, 2]
    assert [value for _, tag, value in points if tag == "swarm/peers"] == [3, 3, 3]


def test_wandb_gets_the_same(made_up, monkeypatch):
    """Against a stand-in for its client, which would call its server; it has three functions that are used here."""
    logged, ended = [], []
    run = SimpleNamespace(log=logged.append, finish=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project, name, settings: run))
    exporter = Wandb("project", "run")
    for _ in range(25):
        made_up.pass_second()
        exporter.note(made_up.view)
    exporter.close()
    assert [point["epoch"] for point in logged] == [0, 1]
    assert logged[0]["swarm/peers"] == 3
    assert ended


FOR_THE_REAL_WANDB = """
import random
from shoal.monitor.exporters import Wandb
from shoal.monitor.run import RunView
from tests.monitor.made_up import MadeUpRun

if __name__ == "__main__":
    exporter, made_up = Wandb("project", "a run"), MadeUpRun(RunView("run"), 3)
    print("\\033[2Ja table that is drawn anew each second")
    for _ in range(25):
        made_up.pass_second()
        exporter.note(made_up.view)
    exporter.close()
"""


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_gets_figures_without_terminal_output(tmp_path: Path):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", FOR_THE_REAL_WANDB], env=environment, cwd=ROOT, check=True, timeout=50)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert all(text in data for text in (b"a run", b"project", b"swarm/peers", b"mean/loss"))
    assert b"drawn anew" not in data


def test_refused_wandb_login_is_one_error(monkeypatch):
    class UsageError(Exception):
        """Of wandb, which has a tree of its own."""

    def init(project: str, name: str, settings: object) -> None:
        raise UsageError("api_key not configured (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ShoalError, match=r"Weights & Biases .*'project'.*api_key not configured.*wandb login"):
        Wandb("project", "run")


@pytest.mark.parametrize("module", ["tensorboardX", "wandb"])
def test_what_is_missing_is_named(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'shoal\[(tensorboard|wandb)\]'"):
        _ = TensorBoard("x") if module == "tensorboardX" else Wandb("x", "y")


def test_prometheus_gets_the_swarm_and_each_peer(made_up):
    pytest.importorskip("prometheus_client")
    exporter = Prometheus(made_up.view, 0)
    try:
        text = ask(exporter.url)
    finally:
        exporter.close()
    assert 'shoal_swarm_peers{run="run"} 3.0' in text
    assert 'shoal_swarm_figure_mean{name="loss",run="run"}' in text
    peer = str(made_up.peers[0].peer)
    assert f'shoal_peer_up{{peer="{peer}",run="run"}} 1.0' in text
    assert f'shoal_peer_figure{{name="loss",peer="{peer}",run="run"}}' in text


@pytest.mark.parametrize("name", ["loss", 'a "quoted" name\\ of\ntwo lines', "größer → {kleiner}"])
def test_prometheus_reads_what_users_name_as_they_like(made_up, name):
    parser = pytest.importorskip("prometheus_client.parser")
    peer = made_up.view.peers[made_up.peers[0].peer]
    peer.report = msgspec.structs.replace(peer.report, metrics={name: 0.5})
    exporter = Prometheus(made_up.view, 0)
    try:
        families = list(parser.text_string_to_metric_families(ask(exporter.url)))
    finally:
        exporter.close()
    assert len({family.name for family in families}) == len(families)
    (figures,) = [family for family in families if family.name == "shoal_peer_figure"]
    mine = [sample for sample in figures.samples if sample.labels["peer"] == str(made_up.peers[0].peer)]
    assert [(sample.labels["name"], sample.value) for sample in mine] == [(name, 0.5)]


def test_a_peer_shows_its_counters_to_prometheus():
    pytest.importorskip("prometheus_client")
    mine = Metrics(bytes_sent=7, troubles=Counter(alone=2), last_failure="a text")
    endpoint = serve_prometheus(0)
    try:
        mine.bytes_sent += 10**9
        text = ask(endpoint.url)
    finally:
        endpoint.close()
    (line,) = [line for line in text.splitlines() if line.startswith("shoal_bytes_sent ")]
    assert float(line.split()[1]) >= 1e9
    assert 'shoal_troubles{by="alone"}' in text
    assert "a text" not in text


def test_prometheus_endpoint_closes_incomplete_requests(monkeypatch, capfd):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT", 0.05)
    endpoint = serve_prometheus(0)
    try:
        with socket.create_connection(("127.0.0.1", urlsplit(endpoint.url).port), timeout=30) as caller:
            caller.sendall(b"GET /metrics HTTP/1.1")
            assert caller.recv(1) == b""  # it has hung up
    finally:
        endpoint.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1", "0.0.0.0"])
def test_prometheus_on_loopback_rejects_foreign_names(made_up, host):
    """A web site whose name leads to this machine could read the figures otherwise."""
    pytest.importorskip("prometheus_client")
    if not can_listen(host):
        pytest.skip(f"this machine has no {host}")
    for start in (lambda: serve_prometheus(0, host), lambda: Prometheus(made_up.view, 0, host)):
        with closing(start()) as endpoint:
            for name in (urlsplit(endpoint.url).netloc, "localhost:1", "127.0.0.1", "[::1]:9"):
                assert ask_as(name, endpoint.url) == (200, "text/plain"), name
            refused = (200, "text/plain") if host == "0.0.0.0" else (400, "text/plain")
            assert ask_as("evil.example", endpoint.url) == refused
            assert ask_as("evil.example:80", endpoint.url) == refused


def test_rejected_prometheus_request_names_the_fix():
    pytest.importorskip("prometheus_client")
    with closing(serve_prometheus(0)) as endpoint:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            ask(urllib.request.Request(endpoint.url, headers={"Host": "evil.example"}))
        with refusal.value:
            text = refusal.value.read().decode()
        assert "'evil.example'" in text
        assert "http://localhost" in text
        assert "shoal_bytes_sent" not in text
        with socket.create_connection(("127.0.0.1", urlsplit(endpoint.url).port), timeout=30) as caller:
            caller.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")  # an old program sends no name
            assert b" 200 " in caller.recv(4096).partition(b"\r\n")[0]


def ask_as(name: str, url: str) -> tuple[int, str]:
    """The status of an answer under a name, and the kind of its content."""
    address = urlsplit(url)
    with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)) as connection:
        connection.request("GET", address.path, headers={"Host": name})
        with connection.getresponse() as answer:
            answer.read()
            return answer.status, answer.headers.get_content_type()


def test_counters_of_several_peers_are_added_up():
    one, other = Metrics(calls_made=1, troubles=Counter(alone=1)), Metrics(calls_made=2, troubles=Counter(alone=3, x=1))
    found = {(name, labels.get("by", "")): value for name, _, labels, value in samples_of([one, other])}
    assert found["shoal_calls_made", ""] == 3
    assert found["shoal_troubles", "alone"] == 4
    assert found["shoal_troubles", "x"] == 1


def test_missing_prometheus_package_names_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"shoal\[prometheus\]"):
        metrics.serve_prometheus(0)
