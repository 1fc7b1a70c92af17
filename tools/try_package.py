"""Installs a built package into an empty environment, as a user would, and lets two peers train there.

    python tools/try_package.py dist/shoal-0.1.0-py3-none-any.whl

Then does the same without torch and numpy, as docs/reachability.md says, and lets one ``shoal dht`` join another one.
``--without-torch`` does this alone.

Versions are those of requirements-dev.txt; what is not in there is not needed.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


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


def install_without_torch(package: Path, folder: Path) -> Path:
    """Make an environment without torch and numpy; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    page = (ROOT / "docs" / "reachability.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^pip install (.*)\npip install --no-deps shoal$", page, re.MULTILINE)
    packages = [name for name in shown.split() if (name, sys.platform) != ("uvloop", "win32")]
    subprocess.run([*pip, "--constraint", ROOT / "requirements-dev.txt", *packages], check=True)
    subprocess.run([*pip, "--no-deps", package.resolve()], check=True)
    script = "import importlib.util as it, sys; sys.exit(any(map(it.find_spec, ('torch', 'numpy'))))"
    subprocess.run([python, "-c", script], check=True)
    return python


def join(python: Path, folder: Path) -> str:
    """Start ``shoal dht`` twice, the second with the short line that the first one prints; returns how large one is.

    Raises:
        RuntimeError: one of them ended before they had met.
    """
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(python), "-m", "shoal.cli", "dht", "--ephemeral", "--refresh-period", "1"]
    seeds: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            address = [_lines(seeds[0], "Give this address to the others:")] if seeds else []
            hosts = ["--host-maddrs", "127.0.0.1:0"]
            seed = subprocess.Popen([*command, *address, *hosts], cwd=folder, env=alone, stdout=-1, text=True)
            seeds.append(seed)
        _lines(seeds[1], "2 DHT nodes (including this one)")
        return _memory_of(seeds[1].pid)
    finally:
        for seed in seeds:
            seed.kill()
            seed.communicate()


def _lines(process: "subprocess.Popen[str]", words: str) -> str:
    """Read on until a line has these words; returns the next one."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return process.stdout.readline().strip()
    raise RuntimeError(f"a peer ended before it said {words!r}")


def _memory_of(pid: int) -> str:
    """The memory of a process, on Linux."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return ""
    [kilobytes] = re.findall(r"^VmRSS:\s+(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
    return f", with {int(kilobytes) / 1000:.0f} MB each"


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
            if not any("peers: 2" in line for line in peer.stdout):
                raise RuntimeError("a peer ended before it had trained with the other one")
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


def _first_line(peer: "subprocess.Popen[str]") -> str:
    assert peer.stdout is not None
    return peer.stdout.readline()


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--without-torch"]
    if len(words) != 1:
        sys.exit(f"say which package: python {sys.argv[0]} dist/*.whl")
    package = Path(words[0])
    with tempfile.TemporaryDirectory(prefix="shoal-package-") as name:
        folder = Path(name)
        if "--without-torch" not in sys.argv:
            train(install(package, folder / "environment"), folder)
            print(f"{package}: installed into an empty environment, where two peers trained together.")
        memory = join(install_without_torch(package, folder / "small"), folder)
    print(f"{package}: installed without torch, where one shoal dht joined another one{memory}.")


if __name__ == "__main__":
    main()
