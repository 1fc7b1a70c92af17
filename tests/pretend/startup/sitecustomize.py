"""Loaded by Python before anything else, in processes that are started by one that pretends: they pretend, too."""

import os
import sys
from pathlib import Path

if os.environ.get("SHOAL_PRETEND"):
    sys.path.append(str(Path(__file__).parents[3]))
    from tests import pretend

    pretend.begin(os.environ["SHOAL_PRETEND"])
