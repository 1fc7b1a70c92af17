"""``shoal server`` as a user sees it: a process that runs experts, with options from a file, until it is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import DHT
from shoal.cli import server
from shoal.cli.__main__ import build_parser, hivemind_server, main
from shoal.moe import get_experts

pytestmark = pytest.mark.timeout(240)
ADDRESSES = re.compile(r"Running DHT node on \['(/ip4/127\.0\.0\.1/tcp/\d+/p2p/(\w+))'\], initial peers = \[\]")


def options_of(*words: str) -> dict[str, Any]:
    return server.chosen_options(build_parser().parse_args(["server", *words]))


@pytest.mark.oldest
def test_options_come_from_the_line_then_the_file_then_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]
    assert options_of()["num_experts"] is None
    (tmp_path / "config.yml").write_text("num_experts: 3\nhidden_dim: 8\nno_relay: true\nincrease_file_limit: false\n")
    (tmp_path / "other.yml").write_text(f"host_maddrs: {here}\nexpert-uids: [e.0, e.1]\nclip_grad_norm: 0.5\n")
    found = options_of("--hidden-dim", "16", "--announce_maddrs", *here)
    assert (found["num_experts"], found["hidden_dim"], found["max_batch_size"]) == (3, 16, 16384)
    assert (found["no_relay"], found["increase_file_limit"], found["announce_maddrs"]) == (True, False, here)
    found = options_of("-c", "other.yml")
    assert (found["num_experts"], found["expert_uids"], found["host_maddrs"]) == (None, ["e.0", "e.1"], here)
    assert found["clip_grad_norm"] == 0.5


@pytest.mark.parametrize(
    ("words", "text", "error"),
    [
        ([], "expert: 3", "unknown option 'expert'; possible are num_experts"),
        ([], "- 3", "must have lines such as"),
        ([], "a: [", "is no YAML"),
        (["--num_experts=1", "--optimizer=adagrad"], "", "--optimizer must be one of adam, sgd, none, got 'adagrad'"),
        (["--num_experts=1", "--compression=half"], "", "--compression must be one of NONE, "),
        (["--num_experts=1", "--expert_uids", "e.0"], "", "give either expert_uids, or num_experts"),
        (["--num_experts=1", "--optimizer=none", "--clip_grad_norm=1"], "", "without an optimizer, leave out"),
        (["--num_experts=1", "--clip_grad_norm=nan"], "", "clip_grad_norm must be a positive number, got nan"),
        (["--num_experts=1", "--expert_cls=fnn"], "", "no expert class 'fnn'"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: list[str], text: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(server, "_show_lines", lambda: None)
    monkeypatch.setattr(server, "end_on_signals", lambda: None)
    file = tmp_path / "options.yml"
    file.write_text(text)
    assert main(["server", "-c", str(file), *words]) == 1
    told = capsys.readouterr().err
    assert told.startswith("shoal server: ")
    assert error in told


def test_server_of_a_script(tmp_path: Path) -> None:
    """Scripts read the addresses from the error output. The identity stays; SIGTERM and SIGINT end it cleanly."""
    peers = []
    words = ["--num_experts", "1", "--hidden_dim", "4", "--identity_path", str(tmp_path / "id"), "--device", "cpu"]
    for number, stop in enumerate((signal.SIGTERM, signal.SIGINT)):
        command = [sys.executable, "-c", f"from {hivemind_server.__module__} import *; sys.exit(hivemind_server())"]
        process = subprocess.Popen(
            [*command, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "SHOAL_COLORS": "0"}
        )
        assert process.stderr is not None
        try:
            if not number:
                assert "Generating new identity" in process.stderr.readline()
            match = ADDRESSES.search(process.stderr.readline())
            assert match is not None
            peers.append(match[2])
            assert "Server started with 1 modules:" in process.stderr.readline()
            assert re.search(r"expert\.0: FeedforwardExpert, \d+ parameters", process.stderr.readline())
            with DHT([match[1]], start=True) as dht:
                (expert,) = get_experts(dht, ["expert.0"])
                assert expert is not None
                assert expert(torch.ones(1, 4)).shape == (1, 4)
            process.send_signal(stop)
            assert process.stderr.read() == "Leaving.\n"
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
    assert peers[0] == peers[1]
