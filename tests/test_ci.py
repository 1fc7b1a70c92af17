"""How CI runs tests: marks, groups, flaky tests, durations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools import again, durations

from tests import marks

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


CONFTEST = """
import pytest
from tests.marks import keep_groups

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    yield
    keep_groups(config, items)
"""


@pytest.fixture(autouse=True)
def _can_import_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
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
    assert " 1 passed in " in output, "only what failed ran again"
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


def test_tests_of_one_group_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text("""
import os
from pathlib import Path
import pytest

@pytest.mark.xdist_group("some group")
@pytest.mark.parametrize("number", range(8))
def test_some(number):
    Path(f"seen-{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])
""")
    command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadgroup"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=50, check=True)
    seen = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert len(seen) == 8
    assert len(set(seen)) == 1, "these versions of pytest and pytest-xdist ignore groups"


def test_a_folder_marks_its_tests(request: pytest.FixtureRequest) -> None:
    test = request.node
    here = SimpleNamespace(__file__=test.path.with_name("conftest.py"), pytestmark=[pytest.mark.once, pytest.mark.slow])
    elsewhere = SimpleNamespace(__file__=test.path.parent / "p2p" / "conftest.py", pytestmark=pytest.mark.pretend)
    config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=lambda: [here, elsewhere, object()]))
    marks.mark_folders(config, [test])
    assert [mark.name for mark in test.iter_markers()].count("once") == 1
    assert [mark.name for mark in test.iter_markers()].count("slow") == 1, "the file has it already"
    assert test.get_closest_marker("pretend") is None
