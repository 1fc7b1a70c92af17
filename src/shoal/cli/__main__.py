"""``python -m shoal.cli``: the ``shoal`` command where it is not on the path."""

from __future__ import annotations

import sys

from shoal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
