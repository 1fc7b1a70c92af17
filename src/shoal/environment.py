"""Environment variables that change what shoal does.

=================================  ====================================================================================
``SHOAL_LOGLEVEL``                 least severe level that is printed; default ``INFO``
``SHOAL_COLORS``                   ``true`` or ``false``; default: colors if the error output is a terminal
``SHOAL_ALWAYS_LOG_CALLER``        ``true``: also lines of level ``INFO`` tell where they come from
``SHOAL_DHT_NUM_WORKERS``          requests in flight of one search in the table; default 4
``SHOAL_HOST_MADDRS``              where peers listen that are not told where, such as ``/ip4/127.0.0.1/tcp/0`` for this
                                   machine alone; several are separated by commas; default: all networks
``SHOAL_LOOP``                     event loop: ``uvloop`` or ``asyncio``; default: uvloop where it is installed
=================================  ====================================================================================

Each is also understood with ``HIVEMIND_`` instead of ``SHOAL_``. ``USE_LEGACY_BFLOAT16`` has no prefix, see
:data:`shoal.compression.base.USE_LEGACY_BFLOAT16`. Variables about memory shared between processes have no effect:
there is none.
"""

from __future__ import annotations

import os


def setting(name: str, default: str = "") -> str:
    """The value of an environment variable, by its name without ``SHOAL_``; what is empty counts as not set."""
    return os.environ.get(f"SHOAL_{name}") or os.environ.get(f"HIVEMIND_{name}") or default


def switch(name: str, default: bool) -> bool:
    """Whether an environment variable is on.

    Raises:
        ValueError: it is neither ``true`` nor ``false``.
    """
    value = setting(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ValueError(f"SHOAL_{name} must be true or false, got {value!r}")
    return value in ("true", "1")
