"""``train.py`` on a machine whose clock jumps at SIGUSR1, by the seconds in JUMP. Used by ``test_clock.py``."""

from __future__ import annotations

import os
import signal
import time

true_time, ahead = time.time, 0.0


def jump(*_: object) -> None:
    global ahead
    ahead += float(os.environ["JUMP"])


signal.signal(signal.SIGUSR1, jump)
time.time = lambda: true_time() + ahead  # before shoal asks what time it is

from tests.system.train import main  # noqa: E402

if __name__ == "__main__":
    main()
