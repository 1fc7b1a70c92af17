"""The files of the source that something passes through, with how many of their functions ran.

``python tools/trail.py step`` traces one global step of two peers in one process, ``store`` one ``DHT.store``, and
``state`` one download of a state. What is there already, such as connections, is not traced: it was made before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType

SOURCE = str(Path(__file__).parents[1] / "src" / "shoal")
HERE = ["/ip4/127.0.0.1/tcp/0"]

_passed: set[CodeType] = set()
_is_on = threading.Event()


def _note(frame: FrameType, event: str, argument: object) -> None:
    if event == "call" and _is_on.is_set() and frame.f_code.co_filename.startswith(SOURCE):
        _passed.add(frame.f_code)


# Before any thread of shoal begins.
threading.setprofile(_note)
sys.setprofile(_note)

import torch  # noqa: E402

import shoal  # noqa: E402


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """What runs inside the block leaves its trail, in whatever thread."""
    _is_on.set()
    yield
    _is_on.clear()


@contextlib.contextmanager
def two_dhts() -> Iterator[tuple[shoal.DHT, shoal.DHT]]:
    with (
        shoal.DHT(start=True, host_maddrs=HERE) as first,
        shoal.DHT(start=True, host_maddrs=HERE, initial_peers=first.get_visible_maddrs()) as second,
    ):
        yield first, second


def store() -> None:
    with two_dhts() as (first, second):
        for key in ("warm up", "traced"):
            with traced() if key == "traced" else contextlib.nullcontext():
                assert second.store(key, 1, shoal.get_dht_time() + 60)
        assert first.get("traced") is not None


def state() -> None:
    with two_dhts() as dhts, contextlib.ExitStack() as stack:
        averagers = [
            stack.enter_context(
                shoal.averaging.DecentralizedAverager([torch.randn(10**6)], dht, prefix="trail", start=True)
            )
            for dht in dhts
        ]
        assert averagers[1].load_state_from_peers(timeout=30) is not None
        with traced():
            assert averagers[1].load_state_from_peers(timeout=30) is not None


def step() -> None:
    ready, go = threading.Barrier(3), threading.Barrier(3)

    def train(dht: shoal.DHT) -> None:
        model = torch.nn.Linear(100, 10)
        with shoal.Optimizer(
            dht=dht,
            run_id="trail",
            target_batch_size=32,
            batch_size_per_step=8,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            matchmaking_time=1.0,
        ) as optimizer:
            for end in (4, 5):
                while optimizer.local_epoch < end:
                    model(torch.randn(8, 100)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.state_averager.finish_jobs(30)
                ready.wait(60)
                go.wait(60)

    with two_dhts() as dhts:
        threads = [threading.Thread(target=train, args=(dht,)) for dht in dhts]
        for thread in threads:
            thread.start()
        ready.wait(120)
        with traced():
            go.wait(60)
            ready.wait(60)
        go.wait(60)
        for thread in threads:
            thread.join()


def main() -> None:
    ways: dict[str, Callable[[], None]] = {"step": step, "store": store, "state": state}
    if len(sys.argv) != 2 or sys.argv[1] not in ways:
        sys.exit(f"usage: python tools/trail.py {'|'.join(ways)}")
    ways[sys.argv[1]]()
    files: dict[str, int] = {}
    for code in _passed:
        name = code.co_filename[len(SOURCE) + 1 :]
        files[name] = files.get(name, 0) + 1
    for name, functions in sorted(files.items()):
        print(f"{functions:5d}  {name}")
    print(f"{sum(files.values()):5d}  functions in {len(files)} files")


if __name__ == "__main__":
    main()
