"""One peer that passes over numbers with others, and writes down each one that it has seen.

    python pass_over.py FILE SAMPLES CHUNK SECONDS [ADDRESS]

Prints its address, and ``over`` when everything is done. Each batch is one chunk, and takes some seconds.
"""

from __future__ import annotations

import sys
import time

import shoal
from shoal.data import SharedPass


def main() -> None:
    file, samples, chunk, seconds, *addresses = sys.argv[1:]
    with (
        shoal.DHT(addresses, start=True) as dht,
        open(file, "a", buffering=1, encoding="ascii") as seen,
        SharedPass(range(int(samples)), dht, "pass_over", batch_size=int(chunk), chunk=int(chunk)) as shared,
    ):
        print(dht.get_visible_maddrs()[0], flush=True)
        for batch in shared.loader():
            seen.write(f"{' '.join(map(str, batch.tolist()))}\n")
            time.sleep(float(seconds))
        print("over", flush=True)


if __name__ == "__main__":
    main()
