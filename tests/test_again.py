"""CI runs failed tests once more, forgives a flaky test once, and keeps durations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import again, durations

pytestmark = pytest.mark.slow

TESTS = """
from pathlib import Path
import pytest

@pytest.mark.xdist_group("some group")
@pytest.mark.parametrize("number", [1, 2])
def test_flaky(number):
    seen = Path(f"seen-{number}")
    assert number == 2 or seen.exists() or seen.touch()

def test_steady():
    assert Path("steady").exists()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "flaky.txt").write_text("# none\n")
    (tmp_path / "steady").touch()
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, again.__file__, "stage", *arguments, "tests"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=50, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_flaky_test_is_forgiven_once(project: Path, processes: str) -> None:
    arguments = ("--numprocesses", processes, "--dist", "loadgroup")
    status, output = run(project, *arguments)
    assert status == 0, output
    line = "flaky, it passed only when it ran again: add it to tests/flaky.txt: tests/test_some.py::test_flaky"
    assert output.splitlines()[-1] == line
    assert (project / ".ci" / "kept" / "flaky.txt").read_text() == f"stage: {line}\n"
    with (project / "tests" / "flaky.txt").open("a") as file:
        file.write("tests/test_some.py::test_flaky\n")
    status, output = run(project, *arguments)
    assert status == 0, "it did not fail this time"
    (project / "seen-1").unlink()
    status, output = run(project, *arguments)
    assert status == 1, output
    assert "flaky again, which fails CI: mend tests/test_some.py::test_flaky," in output.splitlines()[-1]


def test_a_test_that_fails_twice_fails(project: Path) -> None:
    (project / "steady").unlink()
    status, output = run(project)
    assert status == 1, output
    assert "1 failed, 1 passed" in output, "the test that passed at first did not run again"
    assert "add it to tests/flaky.txt: tests/test_some.py::test_flaky" in output
    assert "add it to tests/flaky.txt: tests/test_some.py::test_steady" not in output


def test_nothing_runs_again_if_tests_cannot_run(project: Path) -> None:
    status, output = run(project, "-k", "nothing")
    assert status == 5, output
    assert output.count("test session starts") == 1


@pytest.mark.parametrize("name", ["test_flaky", "tests/test_gone.py::test_x", "tests/test_some.py::test_flaky[1]"])
def test_a_wrong_name_in_the_file_is_told(project: Path, name: str) -> None:
    (project / "tests" / "flaky.txt").write_text(f"{name}\n")
    status, output = run(project)
    assert status == 1
    assert output == f"tests/flaky.txt names {name!r}: say tests/folder/test_file.py::test_name, of an existing file\n"


def test_durations_are_compared_with_those_before(project: Path) -> None:
    run(project)
    stages, files = durations.read(project / ".ci" / "kept")
    assert set(stages) == {"stage"}
    assert set(files) == {"stage: tests/test_some.py"}
    assert stages["stage"] == files["stage: tests/test_some.py"] > 0
    now = {"a": 1.0, "b": 20.0, "c": 3.0}
    assert durations.table(now, {"a": 2.0, "b": 5.5}) == [
        "    20.0 s   (+14.5) b",
        "     3.0 s           c",
        "     1.0 s    (-1.0) a",
    ]
    kept = project / ".ci" / "kept"
    command = [sys.executable, durations.__file__, kept, project / "nothing"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[2:] for line in lines] == [["stage"], [], ["stage:", "tests/test_some.py"], []]
