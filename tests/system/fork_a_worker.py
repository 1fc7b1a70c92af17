"""A peer whose process has a forked worker, as data loaders have; the worker does nothing and outlives its parent."""

from __future__ import annotations

import json
import os
import sys
import time

from shoal.base.reactor import Portal
from shoal.p2p import P2P


def main() -> None:
    portal = Portal("test peer")
    p2p = portal.call(P2P.create(sys.argv[1:]))
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    address = str(portal.call(p2p.get_visible_maddrs())[0])
    print(json.dumps({"address": address, "worker": worker}), flush=True)
    if sys.stdin.readline() == "close\n":
        portal.call(p2p.shutdown())
    print(json.dumps({"closed": True}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
