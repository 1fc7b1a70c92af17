"""Code that the documents show runs as it stands, and the examples do."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.computers import CAN_MAKE_COMPUTERS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200, check=False)


def test_first_code_of_the_readme() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    done = run_python("-c", code[1])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "/p2p/12D3KooW" in done.stdout


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


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize(
    ("name", "needs", "training", "status"),
    [("quickstart", "sklearn", "1 peer\n", 0), ("lightning_digits", "lightning", "keeps its own", 1)],
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
    if name == "quickstart":
        assert output.endswith("Stopped. The others carry on.\n")


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/architecture.md",
        "docs/private-swarms.md",
        "docs/reachability.md",
    ],
)
def test_files_that_the_documents_point_to_exist(name: str) -> None:
    document = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text())
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing
