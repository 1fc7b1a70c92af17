"""A trainer as any other, told ``--lie NAME`` also a liar: its averagers do what that lie says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from shoal.averaging.node import AveragerNode
from tests.hostile.attacks.members import LIES
from tests.system import train

place = sys.argv.index("--lie")
lie = LIES[sys.argv[place + 1]]
del sys.argv[place : place + 2]
make_honest = AveragerNode.__init__


def make_liar(self: AveragerNode, *args: Any, **settings: Any) -> None:
    make_honest(self, *args, **settings)
    lie(self)


if __name__ == "__main__":
    AveragerNode.__init__ = make_liar  # type: ignore[method-assign]
    train.main()
