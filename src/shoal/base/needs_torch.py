"""Imported first by every room that works with tensors, for one clear error where torch is not installed.

What only moves bytes, such as ``shoal dht``, does without torch and numpy: on a rented machine that is 5 GB less.
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
