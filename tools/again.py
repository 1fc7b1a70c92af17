"""Run tests as CI does: what fails runs once more, and the durations are kept.

``python tools/again.py STAGE ARGUMENTS`` gives the arguments to pytest. On a busy machine a test can be late, so what
fails runs again, in one process. A test that passes only then is flaky. CI forgives it once, and prints the line to add
to ``tests/flaky.txt``. If a test of that file is flaky again, the run fails.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

FLAKY = Path("tests/flaky.txt")
KEPT = Path(".ci/kept")
"""The durations of each stage, as JUnit's XML, for tools/durations.py; and the flaky tests."""
FAILED = 1
"""The status of pytest if tests failed; others mean that it did not run them."""


def main(stage: str, arguments: list[str]) -> int:
    known = _read_known()
    cache = Path(".pytest_cache", stage)
    failures = cache / "v" / "cache" / "lastfailed"
    failures.unlink(missing_ok=True)  # those of an earlier run
    KEPT.mkdir(parents=True, exist_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache.as_posix()}", *arguments]
    status = _run([*pytest, "--durations=25", f"--junitxml={KEPT / stage}.xml"])
    if status != FAILED or not (failed := _read(failures)):
        return status
    failures.write_text(json.dumps(dict.fromkeys(failed, True)), encoding="utf-8")
    status = _run([*pytest, "--numprocesses=0", "--last-failed", "--last-failed-no-failures=none"])
    if status not in (0, FAILED):
        return status
    lines = []
    for name in sorted({test.partition("[")[0] for test in failed - _read(failures)}):
        if name in known:
            status = FAILED
            lines.append(f"flaky again, which fails CI: mend {name}, then remove it from {FLAKY.as_posix()}")
        else:
            lines.append(f"flaky, it passed only when it ran again: add it to {FLAKY.as_posix()}: {name}")
    if lines:
        print(*lines, sep="\n", flush=True)
        with (KEPT / "flaky.txt").open("a", encoding="utf-8") as file:
            file.writelines(f"{stage}: {line}\n" for line in lines)
    return status


def _run(pytest: list[str]) -> int:
    """Return the status of pytest. After a signal, wait until pytest has ended its processes."""
    with subprocess.Popen(pytest) as process:
        signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to pytest, too
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        return process.wait()


def _read_known() -> set[str]:
    """The names in ``tests/flaky.txt``, without parameters: one flaky case makes the test flaky."""
    lines = map(str.strip, FLAKY.read_text(encoding="utf-8").splitlines())
    known = {line for line in lines if line and not line.startswith("#")}
    for name in known:
        path, _, test = name.partition("::")
        if "[" in name or not test or not Path(path).is_file():
            sys.exit(
                f"{FLAKY.as_posix()} names {name!r}: say tests/folder/test_file.py::test_name, of an existing file"
            )
    return known


def _read(failures: Path) -> set[str]:
    """What pytest noted as failed. pytest-xdist adds ``@`` and a group to names; without xdist they have none."""
    if not failures.exists():
        return set()
    names = json.loads(failures.read_text(encoding="utf-8"))
    return {name[: name.rfind("@")] if name.rfind("@") > name.rfind("]") else name for name in names}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("say which stage: python tools/again.py STAGE [ARGUMENTS OF PYTEST]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
