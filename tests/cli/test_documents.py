"""Code that the documents show runs as it stands, and the examples do."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.computers import CAN_MAKE_COMPUTERS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=200, check=False)


def shown_code() -> list[tuple[str, str]]:
    """Each block of Python in the documents, and where it is."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        (f"{document.name}-{number}", match[1])
        for document in documents
        for number, match in enumerate(re.finditer(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL))
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=place) for place, code in shown_code()])
def test_what_documents_name_exists(code: str) -> None:
    """All of it can be parsed, whatever starts with ``shoal.`` is there, and so is each argument by name."""
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal"):
            assert node.module is not None
            room = importlib.import_module(node.module)
            assert all(hasattr(room, name.name) for name in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"shoal(\.\w+)+", path := ast.unparse(node)):
            assert found(path) is not None, path
        if isinstance(node, ast.Call) and re.fullmatch(r"shoal(\.\w+)+", path := ast.unparse(node.func)):
            parameters = inspect.signature(found(path)).parameters
            if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
                assert {each.arg for each in node.keywords if each.arg} <= parameters.keys(), ast.unparse(node)


def found(path: str) -> Any:
    """What a dotted path such as ``shoal.dht.DHT`` leads to."""
    value: Any = importlib.import_module("shoal")
    for place, name in enumerate(path.split(".")[1:], 2):
        if not hasattr(value, name):
            importlib.import_module(".".join(path.split(".")[:place]))
        value = getattr(value, name)
    return value


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
