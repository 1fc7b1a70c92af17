"""The files of the source that something passes through, with how many of their functions ran.

``python tools/trail.py step`` traces one global step of two peers in one process, ``store`` one ``DHT.store``,
``state`` one download of a state, ``diloco`` one slot with its exchange, and ``crash`` a round of four of which one
dies. What is there already, such as connections, is not traced: it was made before.

*Classes with state* are those of which a method ran, and that have attributes. A call *goes back up* if the file that
is called imports the calling one, directly or by way of others, and not the other way round: it was handed down. That
the event loop resumes a coroutine is no call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from house import House

SOURCE = str(Path(__file__).parents[1] / "src" / "shoal")
HERE = ["/ip4/127.0.0.1/tcp/0"]

_passed: set[CodeType] = set()
_calls: set[tuple[CodeType, CodeType]] = set()
_is_on = threading.Event()


def _note(frame: FrameType, event: str, argument: object) -> None:
    if event == "call" and _is_on.is_set() and frame.f_code.co_filename.startswith(SOURCE):
        _passed.add(frame.f_code)
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(SOURCE):
            _calls.add((caller.f_code, frame.f_code))


# Before any thread of shoal begins.
threading.setprofile(_note)
sys.setprofile(_note)

import torch  # noqa: E402

import shoal  # noqa: E402
from shoal.averaging.control import AveragingStage  # noqa: E402


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


def one_more_epoch(
    make: Callable[[shoal.DHT, torch.nn.Module], Any], finish: Callable[[Any], object] = lambda optimizer: None
) -> None:
    """Trace the epoch of two peers that comes after their fourth.

    Args:
        make: makes the optimizer of a peer.
        finish: waits for what the optimizer still does in the background.
    """
    ready, go = threading.Barrier(3), threading.Barrier(3)

    def train(dht: shoal.DHT) -> None:
        model = torch.nn.Linear(100, 10)
        with make(dht, model) as optimizer:
            for end in (4, 5):
                while optimizer.local_epoch < end:
                    model(torch.randn(8, 100)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                finish(optimizer)
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


def step() -> None:
    one_more_epoch(
        lambda dht, model: shoal.Optimizer(
            dht=dht,
            run_id="trail",
            target_batch_size=32,
            batch_size_per_step=8,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            matchmaking_time=1.0,
        ),
        lambda optimizer: optimizer.state_averager.finish_jobs(30),
    )


def diloco() -> None:
    one_more_epoch(
        lambda dht, model: shoal.DiLoCo(
            dht=dht,
            run_id="trail",
            params=model.parameters(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            sync_every=4,
            batch_size_per_step=8,
        )
    )


def crash() -> None:
    """A member that has found the group dies instead of sending its part."""
    with contextlib.ExitStack() as stack:
        dhts = [stack.enter_context(shoal.DHT(start=True, host_maddrs=HERE))]
        known = dhts[0].get_visible_maddrs()
        dhts += [stack.enter_context(shoal.DHT(start=True, host_maddrs=HERE, initial_peers=known)) for _ in range(3)]
        options = {"prefix": "trail", "target_group_size": 4, "min_matchmaking_time": 2.0, "start": True}
        averagers = [
            stack.enter_context(shoal.averaging.DecentralizedAverager([torch.randn(10**6)], dht, **options))
            for dht in dhts
        ]
        for is_traced in (False, True):
            controls = [averager.step(wait=False, require_trigger=True, timeout=60) for averager in averagers]
            while any(control.stage < AveragingStage.AWAITING_TRIGGER for control in controls):
                time.sleep(0.05)
            with traced() if is_traced else contextlib.nullcontext():
                if is_traced:
                    dhts[3].shutdown()
                    averagers[3].shutdown()
                for control in controls[:3] if is_traced else controls:
                    control.allow_allreduce()
                for control in controls[:3] if is_traced else controls:
                    assert control.result(60)


def report() -> None:
    """Print what has run."""
    house = House()
    names = {str(Path(SOURCE).parent / m.path): name for name, m in house.modules.items()}
    files = Counter(names[code.co_filename] for code in _passed)
    for name, functions in sorted(files.items()):
        print(f"{functions:5d}  {name}")
    attributes = {
        (name, each): len(found) for name, m in house.modules.items() for each, _, found in m.classes() if found
    }
    ran = {(names[code.co_filename], part) for code in _passed for part in code.co_qualname.split(".")}
    with_state = ran & attributes.keys()
    calls = {(a, b) for a, b in _calls if a.co_qualname != "Reactor._run"}
    up = {(a, b) for a, b in calls if house.is_above(names[b.co_filename], names[a.co_filename])}
    print(f"files                    {len(files)}")
    print(f"functions                {sum(files.values())}")
    print(f"classes with state       {len(with_state)}")
    print(f"their attributes         {sum(attributes[each] for each in with_state)}")
    print(f"calls that go back up    {len(up)}")


def main() -> None:
    ways: dict[str, Callable[[], None]] = {
        "step": step,
        "store": store,
        "state": state,
        "diloco": diloco,
        "crash": crash,
    }
    if len(sys.argv) != 2 or sys.argv[1] not in ways:
        sys.exit(f"usage: python tools/trail.py {'|'.join(ways)}")
    ways[sys.argv[1]]()
    report()


if __name__ == "__main__":
    main()
