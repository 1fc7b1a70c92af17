"""The examples run, and so does the first code of the README, as processes of their own; and the notebook."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents.pages import ROOT
from tests.drills import mostly_drills
from tests.system.swarm import START_LIMIT_SECONDS, Peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("commands"),
    pytest.mark.timeout(600),  # each wait has a limit of its own
]


def first_code_of(page: str) -> str:
    code = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    return code[1]


def test_readme_and_index_begin_with_the_same_program() -> None:
    assert first_code_of("README.md") == first_code_of("docs/index.md")


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_two_peers_run_the_readme_s_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(first_code_of("README.md"), encoding="utf-8")
    environment = {**os.environ, "SHOAL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    peers = [subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=environment, **pipes)]
    try:
        assert peers[0].stdout is not None
        line = peers[0].stdout.readline()
        assert line.startswith("Others join with:  python train.py 127.0.0.1:")
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


@pytest.fixture(params=mostly_drills([False, True]), ids=["", "busy"])
def _busy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another program computes beside the peers, for a few minutes at most."""
    if not request.param:  # CI runs other tests beside them
        yield
        return
    code = "import time\nend = time.monotonic() + 240\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        yield
        process.kill()


def join(program: Path, first: Peer, *arguments: str, **options: Any) -> Peer:
    """Start another peer as the first one says."""
    path, address = first.wait_for_line("^Others join with: python (.*)", START_LIMIT_SECONDS)[1].split()
    assert ROOT / path == program
    return Peer(program, address, *arguments, **options)


EXAMPLES = [
    ("quickstart", "sklearn"),
    ("language_model", "torch"),
    ("lightning_digits", "lightning"),
    ("huggingface", "transformers"),
    ("vision", "sklearn"),  # like the quick start
    ("lora", "peft"),  # like the one with Hugging Face's trainer
]
EXTRAS = {
    "quickstart": "examples",
    "vision": "examples",
    "lightning_digits": "lightning,examples",
    "huggingface": "transformers",
    "lora": "transformers",
}
"""What ``pip install`` adds for them."""
STEP = r"^\d+ s: .*?(?:epoch|slot|step) (\d+),"
"""How many steps the run has made, in a line that tells how it goes."""
TOGETHER = STEP + ".*peers: 2"


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize("example", mostly_drills(EXAMPLES, quick=4), ids=[name for name, _ in EXAMPLES])
@pytest.mark.usefixtures("_busy")
def test_two_peers_train_together_until_they_are_stopped(tmp_path: Path, example: tuple[str, str]) -> None:
    """The second one joins through the line that the first one prints first."""
    name, needs = example
    pytest.importorskip(needs)
    program = ROOT / "examples" / f"{name}.py"
    # Packages beneath those of Hugging Face and Lightning warn of each other.
    own = name in ("quickstart", "vision", "language_model")
    options: dict[str, Any] = {"environment": os.environ | ({"PYTHONWARNINGS": "error"} if own else {})}
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    peers = [Peer(program, cwd=tmp_path / "first", **options)]
    try:
        reached = int(peers[0].wait_for_line(STEP, START_LIMIT_SECONDS)[1])
        peers.append(join(program, peers[0], cwd=tmp_path / "second", **options))
        begins = peers[1].wait_for_line(r"(?:epoch|slot|step) (\d+).*, peers: \d", START_LIMIT_SECONDS)
        assert int(begins[1]) >= reached, "it has the state of the first one"
        for peer in peers:
            steps = int(peer.wait_for_line(TOGETHER, START_LIMIT_SECONDS)[1])
            peer.wait_for("line", START_LIMIT_SECONDS, lambda event, before=steps: steps_of(event["line"]) > before)
        for peer in peers:
            peer.process.send_signal(signal.SIGINT)
        for peer in peers:
            assert peer.wait(START_LIMIT_SECONDS) == 0, peer.errors()
            assert "Traceback" not in peer.errors()
            assert "Error" not in peer.errors().replace("Detected KeyboardInterrupt", "")
            assert peer.all("line")[-1]["line"] == "Stopped. The others carry on."
    finally:
        for peer in peers:
            peer.close()


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_a_model_in_stages_survives_a_death() -> None:
    program = ROOT / "examples" / "stages.py"
    options: dict[str, Any] = {"environment": os.environ | {"PYTHONWARNINGS": "error"}}
    peers = [Peer(program, "--stage", "0", **options)]
    try:
        peers += [join(program, peers[0], "--stage", stage, **options) for stage in ("1", "1", "2")]
        peers.append(join(program, peers[0], "--stage", "none", **options))
        drivers = [peers[0], peers[-1]]
        reached = int(peers[0].wait_for_line(STEP, START_LIMIT_SECONDS)[1])
        peers.pop(1).close()  # SIGKILL
        peers.append(join(program, peers[0], "--serve", **options))
        for peer in drivers:
            peer.wait_for("line", START_LIMIT_SECONDS, lambda event: step_of(event["line"]) > reached + 15)
        for peer in peers:
            peer.process.send_signal(signal.SIGINT)
        for peer in peers:
            assert peer.wait(START_LIMIT_SECONDS) == 0, peer.errors()
            assert "Traceback" not in peer.errors()
            assert peer.all("line")[-1]["line"] == "Stopped. The others carry on."
    finally:
        for peer in peers:
            peer.close()


def step_of(line: str) -> int:
    """Up to which step the run is, in a line that tells how it goes; 0 in others."""
    match = re.search(STEP, line)
    return 0 if match is None else int(match[1])


def steps_of(line: str) -> int:
    """How many steps a line says that two peers have made together; 0 if it says nothing of that."""
    match = re.search(TOGETHER, line)
    return 0 if match is None else int(match[1])


@pytest.mark.parametrize(
    ("name", "package", "extra"), [(*each, EXTRAS[each[0]]) for each in EXAMPLES if each[0] in EXTRAS]
)
def test_example_names_missing_packages(monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str) -> None:
    for each in (package, *(module for module in sys.modules if module.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, each, None)  # as if it were not installed
    with pytest.raises(SystemExit, match=re.escape(f"pip install '.[{extra}]'")):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_examples_are_short() -> None:
    programs = sorted((ROOT / "examples").glob("*.py"))
    assert len(programs) >= 4
    assert [path.name for path in programs if len(lines_of(path)) > 120] == []


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
