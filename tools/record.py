"""Records two peers that run the first program of the README, as an animated picture of two terminals.

    python tools/record.py docs/pictures/two-peers.svg

The second peer starts when the first has made some steps. Lines appear as they were printed, only faster: the whole
takes :data:`SHOWN_SECONDS`, and the picture says how much faster. No other program should be busy on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS, ROWS = 50, 13
SHOWN_SECONDS, PAUSE_SECONDS = 14, 4
ALONE, TOGETHER = 3, 5
"""How many steps the first peer makes before the second starts, and after that."""
STYLE = """
    svg { --back: #f4f7f8; --bar: #dfe7ea; --ink: #17242d; --soft: #55656f; --new: #00796b; }
    @media (prefers-color-scheme: dark) {
      svg { --back: #10181d; --bar: #22303a; --ink: #e7eff2; --soft: #a2b3bb; --new: #4fd1bd; }
    }
    text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); white-space: pre; }
    .soft { fill: var(--soft); }
    .two { fill: var(--new); }
    @media (prefers-reduced-motion: no-preference) { .line { animation: show TOTALs step-end infinite; opacity: 0; } }
"""


class Terminal:
    """A process, and when it has printed what."""

    def __init__(self, folder: str, command: str, begin: float) -> None:
        self.lines = [(time.monotonic() - begin, f"$ {command}")]
        environment = {**os.environ, "SHOAL_HOST_MADDRS": "/ip4/127.0.0.1/tcp/0"}
        words = [sys.executable, *command.split()[1:]]
        self.process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, args=(begin,))
        self._reader.start()

    def _read(self, begin: float) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - begin, line.rstrip()))

    def wait_for(self, pattern: str, times: int = 1) -> None:
        while sum(bool(re.search(pattern, line)) for _, line in list(self.lines)) < times:
            if self.process.poll() is not None:
                raise SystemExit(f"the program has ended: {self.lines}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self._reader.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    picture = parser.parse_args().picture
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(found[1], "utf-8")
        begin = time.monotonic()
        terminals = [Terminal(folder, "python train.py", begin)]
        try:
            terminals[0].wait_for("samples/s", ALONE)
            address = terminals[0].lines[1][1].split()[-1]
            terminals.append(Terminal(folder, f"python train.py {address}", begin))
            terminals[0].wait_for("peers 2, .* samples/s", TOGETHER)
        finally:
            for terminal in reversed(terminals):
                terminal.stop()
    for name, terminal in zip(("first", "second"), terminals, strict=True):
        print(f"{name} terminal", *(f"{seconds:6.1f}  {line}" for seconds, line in terminal.lines), sep="\n")
    picture.write_text(drawn([terminal.lines for terminal in terminals]), "utf-8")


def drawn(recorded: list[list[tuple[float, str]]]) -> str:
    """The picture."""
    last = max(seconds for lines in recorded for seconds, _ in lines)
    speed, total = last / SHOWN_SECONDS, SHOWN_SECONDS + PAUSE_SECONDS
    panel = 42 + 18 * ROWS
    moments: list[str] = []
    body: list[str] = []
    for number, (title, lines) in enumerate(zip(("one computer", "another one"), recorded, strict=True)):
        top = number * (panel + 10)
        body.append(f'<rect y="{top}" width="420" height="{panel}" rx="8" fill="var(--back)"/>')
        body.append(f'<path d="M0 {top + 28}V{top + 8}q0-8 8-8h404q8 0 8 8v20z" fill="var(--bar)"/>')
        note = f"{speed:.0f} times as fast as it was" if number == 0 else ""
        body.append(f'<text class="soft" x="12" y="{top + 19}">{title}</text>')
        body.append(f'<text class="soft" x="408" y="{top + 19}" text-anchor="end">{note}</text>')
        row = 0
        for seconds, line in lines:
            short = re.sub(r"(12D3KooW)\w+", r"\1…", line)
            kind = "line two" if "peers 2" in line else "line"
            for piece in textwrap.wrap(short, COLUMNS, break_on_hyphens=False) or [""]:
                if row < ROWS:
                    style = f' style="animation-name: show{len(moments)}"' if seconds > 0.1 else ' style="opacity: 1"'
                    body.append(f'<text class="{kind}"{style} x="12" y="{top + 50 + 18 * row}">{escape(piece)}</text>')
                row += 1
            moments.append(
                f"@keyframes show{len(moments)} {{ {100 * seconds / speed / total:.1f}% {{ opacity: 1; }} }}"
            )
    height = 2 * panel + 10
    size = f'width="420" height="{height}" viewBox="0 0 420 {height}"'
    style = STYLE.replace("TOTAL", str(total)) + "".join(f"    {each}\n" for each in moments)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        "  <title>Two peers train one model: the second joins, and both make twice as many samples per second</title>\n"
        f"  <style>{style}  </style>\n" + "".join(f"  {each}\n" for each in body) + "</svg>\n"
    )


if __name__ == "__main__":
    main()
