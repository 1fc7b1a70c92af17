"""The examples run, and so does the first code of the README, as processes of their own; and the notebook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.computers import CAN_MAKE_COMPUTERS
from tests.documents.pages import ROOT
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = pytest.mark.timeout(300)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200, check=False)


def first_code_of(page: str) -> str:
    code = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    return code[1]


def test_readme_and_index_begin_with_the_same_program() -> None:
    assert first_code_of("README.md") == first_code_of("docs/index.md")


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_two_peers_run_the_first_program_of_the_readme_until_they_are_stopped(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(first_code_of("README.md"), encoding="utf-8")
    environment = {**os.environ, "SHOAL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    peers = [subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=environment, **pipes)]
    try:
        assert peers[0].stdout is not None
        line = peers[0].stdout.readline()
        assert line.startswith("Others join with:  python train.py /ip4/")
        words = line.split()[3:]  # what a user pastes
        peers.append(subprocess.Popen([sys.executable, *words[1:]], cwd=tmp_path, env=environment, **pipes))
        for peer in peers:
            assert peer.stdout is not None
            assert any(re.search(r"loss [\d.]+, peers 2, \d+ samples/s$", line) for line in peer.stdout)
        for peer in reversed(peers):
            peer.send_signal(signal.SIGINT)
            _, errors = peer.communicate(timeout=60)
            assert (peer.returncode, errors) == (0, "")
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


@pytest.mark.skipif(CAN_MAKE_COMPUTERS, reason="tests/system does it between two hosts")
@pytest.mark.timeout(300)
def test_two_peers_run_the_quickstart_together() -> None:
    program = str(ROOT / "examples" / "quickstart.py")
    first = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    second = None
    try:
        assert first.stdout is not None
        address = first.stdout.readline().split()[-1]
        second = subprocess.Popen(
            [sys.executable, program, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for process in (first, second):
            assert process.stdout is not None
            assert any("2 peers" in line for line in process.stdout), "never saw the other one"
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()


@pytest.mark.slow_drill
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize(
    ("name", "needs", "training", "status"),
    [
        ("quickstart", "sklearn", "1 peer\n", 0),
        ("lightning_digits", "lightning", "keeps its own", 1),
        ("huggingface", "transformers", "swarm_epoch", 0),
    ],
)
def test_ctrl_c_ends_the_examples_politely(tmp_path: Path, name: str, needs: str, training: str, status: int) -> None:
    """Lightning itself says so with a status of 1."""
    pytest.importorskip(needs)
    program = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(program.replace("20_000", "1_000"), encoding="utf-8")  # its epochs are long
    command = [sys.executable, "-u", f"{name}.py"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, encoding="utf-8"
    ) as process:
        try:
            assert process.stdout is not None
            assert any(training in line for line in process.stdout), "it never trained"
            process.send_signal(signal.SIGINT)
            output = process.stdout.read()
            process.wait()
        finally:
            process.kill()
    assert "Traceback" not in output
    assert "Error" not in output.replace("Detected KeyboardInterrupt", "")
    assert process.returncode == status, output
    if status == 0:
        assert output.endswith("Stopped. The others carry on.\n")


@pytest.mark.parametrize(
    ("name", "option", "count", "begins", "says"),
    [
        ("language_model", "--slots", 2, "^slot 1: ", r"slot 2: loss [0-4]\.\d+ nats.*\nThe statement "),
        ("vision", "--passes", 2, "^pass 1: ", "pass 2: epoch"),
        (
            "lora",
            "--steps",
            4,
            r"^step [1-9]\d*: loss",
            "The adapters are in lora_adapters",
        ),
    ],
)
def test_two_peers_run_an_example(tmp_path: Path, name: str, option: str, count: int, begins: str, says: str) -> None:
    """The second one joins through the line that the first one prints."""
    # Packages beneath that of Hugging Face warn of each other.
    environment = os.environ | {"PYTHONWARNINGS": "error" if name != "lora" else "default"}
    if name == "lora":
        pytest.importorskip("peft")
    program = ROOT / "examples" / f"{name}.py"
    first = Peer(program, option, "100000", cwd=tmp_path, environment=environment)
    try:
        line = first.wait_for_line("^Others join with: python (.*)", START_LIMIT_SECONDS)[1]
        path, address = line.split()
        assert ROOT / path == program
        first.wait_for_line(begins, START_LIMIT_SECONDS)
        second = Peer(program, address, option, str(count), cwd=tmp_path, environment=environment)
        try:
            assert second.wait(START_LIMIT_SECONDS) == 0, second.errors()
            printed = "\n".join(event["line"] for event in second.all("line"))
            assert re.search(says, printed), printed
        finally:
            second.close()
        os.kill(first.process.pid, signal.SIGINT)
        assert first.wait(START_LIMIT_SECONDS) == 0, first.errors()
        assert first.all("line")[-1]["line"] == "Stopped. The others carry on."
        assert "Traceback" not in first.errors()
    finally:
        first.close()


def test_examples_are_short() -> None:
    programs = sorted((ROOT / "examples").glob("*.py"))
    assert len(programs) >= 4
    assert [path.name for path in programs if len(lines_of(path)) >= 100] == []


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


async def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """All cells in one namespace, while an event loop runs in this thread, as one does in a notebook."""
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    finally:
        for name in ("second", "first"):
            if name in names:
                names[name].shutdown()
    printed = capsys.readouterr().out
    assert "a fact" in printed
    assert len(re.findall(r"epoch \d+, peers: 2, test accuracy [6-9]\d%", printed)) == 2, printed
