"""Imported first by every package that works with tensors, for one clear error if torch is not installed.

Programs that only move bytes, such as ``shoal dht``, need neither torch nor numpy: that saves 5 GB on a rented machine.
"""

import importlib

from shoal.errors import torch_is_missing

for _package in ("torch", "numpy"):
    try:
        importlib.import_module(_package)
    except ModuleNotFoundError as e:
        if e.name != _package:
            raise
        raise torch_is_missing(_package) from None
