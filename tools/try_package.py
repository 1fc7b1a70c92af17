"""Installs a built package into an empty environment, as a user would, and lets two peers train there.

    python tools/try_package.py dist/shoal-0.1.0-py3-none-any.whl

Versions are those of requirements-dev.txt; what is not in there is not needed.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 600


def install(package: Path, folder: Path) -> Path:
    """Make an environment in this folder that has the package and nothing of this checkout; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--quiet", "--constraint", ROOT / "requirements-dev.txt", f"{package.resolve()}[examples]"],
        check=True,
    )
    subprocess.run([*pip, "check"], check=True)
    return python


def train(python: Path, folder: Path) -> None:
    """Run the quickstart twice, until each of the two has trained with the other.

    Raises:
        RuntimeError: one of them ended before.
    """
    program = folder / "quickstart.py"
    program.write_text((ROOT / "examples/quickstart.py").read_text(encoding="utf-8"), encoding="utf-8")
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    peers: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            address = [_first_line(peers[0]).split()[-1]] if peers else []
            command = [str(python), "-u", str(program), *address]
            peers.append(subprocess.Popen(command, cwd=folder, env=alone, stdout=subprocess.PIPE, text=True))
        for peer in peers:
            assert peer.stdout is not None
            if not any("2 peers" in line for line in peer.stdout):
                raise RuntimeError("a peer ended before it had trained with the other one")
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


def _first_line(peer: "subprocess.Popen[str]") -> str:
    assert peer.stdout is not None
    return peer.stdout.readline()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"say which package: python {sys.argv[0]} dist/*.whl")
    with tempfile.TemporaryDirectory(prefix="shoal-package-") as name:
        folder = Path(name)
        python = install(Path(sys.argv[1]), folder / "environment")
        train(python, folder)
    print(f"{sys.argv[1]}: installed into an empty environment, where two peers trained together.")


if __name__ == "__main__":
    main()
