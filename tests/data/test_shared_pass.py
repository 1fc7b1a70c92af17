"""``SharedPass`` and ``shuffled`` as programs use them: with torch's DataLoader and its workers, and with streams."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.data import SharedPass, leases, shuffled
from shoal.data.shuffled import shuffler
from shoal.dht import DHT
from shoal.errors import ReactorError


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers look more often what is left than on the internet."""
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.05)


@pytest.fixture
def dhts() -> Iterator[list[DHT]]:
    first = DHT(start=True)
    both = [first, DHT(first.get_visible_maddrs(), start=True)]
    yield both
    for dht in both:
        dht.shutdown()


class Stream(IterableDataset[int]):
    """Numbers, the same ones each time."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.samples))


def in_all(batches: Iterable[torch.Tensor]) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


def in_threads(loaders: list[Iterable[torch.Tensor]]) -> list[list[int]]:
    seen: list[list[int]] = [[] for _ in loaders]

    def pass_over(place: int) -> None:
        seen[place] = in_all(loaders[place])

    threads = [threading.Thread(target=pass_over, args=(place,)) for place in range(len(loaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_each_pass_covers_everything_in_a_new_order(dhts: list[DHT]) -> None:
    with SharedPass(range(100), dhts[0], "run", batch_size=8, chunk=10) as shared:
        loader = shared.loader()
        passes = [[batch.tolist() for batch in loader] for _ in range(2)]
        assert shared.number == 2
    for batches in passes:
        assert sorted(chain(*batches)) == list(range(100))
        assert [len(batch) for batch in batches] == [8] * 12 + [4]
    assert passes[0] != passes[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_peers_share_a_pass(dhts: list[DHT], workers: int, caplog: pytest.LogCaptureFixture) -> None:
    passes = [SharedPass(range(300), dht, "run", batch_size=4, chunk=5) for dht in dhts]
    seen = in_threads([shared.loader(num_workers=workers) for shared in passes])
    assert sorted(chain(*seen)) == list(range(300))
    assert [shared.number for shared in passes] == [1, 1]
    for shared in passes:
        shared.shutdown()
    assert "has no batches" not in caplog.text


def test_batch_sampler_ends_with_the_pass(dhts: list[DHT]) -> None:
    with SharedPass(range(40), dhts[0], "run", batch_size=6, chunk=4, shuffle=False) as shared:
        loader: DataLoader[Any] = DataLoader(range(40), batch_sampler=shared)  # type: ignore[arg-type]
        for _ in range(2):
            assert sorted(in_all(loader)) == list(range(40))


def test_batches_drawn_ahead_count_once_consumed(dhts: list[DHT]) -> None:
    with SharedPass(range(60), dhts[0], "run", batch_size=5, chunk=5, drawn_ahead=4) as shared:
        batches = iter(shared)
        for drawn in range(1, 11):
            next(batches)
            assert shared.leases().done.bit_count() == max(0, drawn - 5)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_iteration_is_a_pass_despite_prefetching(dhts: list[DHT], workers: int) -> None:
    """The loader never draws again after its last batches; they are done when the next iteration begins."""
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 2} if workers else {}
    with SharedPass(range(40), dhts[0], "run", batch_size=5, chunk=5, drawn_ahead=2) as shared:
        loader: DataLoader[Any] = DataLoader(range(40), batch_sampler=shared, **options)  # type: ignore[arg-type]
        for number in range(3):
            assert sorted(in_all(loader)) == list(range(40))
            assert shared.number == number


def test_early_exit_with_prefetching_continues_later(dhts: list[DHT]) -> None:
    with SharedPass(range(60), dhts[0], "run", batch_size=5, chunk=5, drawn_ahead=2) as shared:
        loader: DataLoader[Any] = DataLoader(range(60), batch_sampler=shared)  # type: ignore[arg-type]
        seen = [next(batches).tolist() for batches in [iter(loader)] for _ in range(6)]
        rest = in_all(loader)
        assert len(rest) == 60 - 5 * 3
        assert {*chain(*seen), *rest} == set(range(60))


def test_begun_chunks_come_again(dhts: list[DHT]) -> None:
    with SharedPass(range(60), dhts[0], "run", batch_size=10, chunk=20) as shared:
        seen = []
        for number, batch in enumerate(shared.loader()):
            seen += batch.tolist()
            if number == 2:
                break  # at the second chunk: its other half was not drawn
        assert round(60 * shared.progress) == 20
        seen += in_all(shared.loader())
    counted = Counter(seen)
    assert set(counted) == set(range(60))
    assert sum(counted.values()) == 70


def test_run_without_peers_continues_from_saved_state(dhts: list[DHT]) -> None:
    with SharedPass(range(60), dhts[0], "run", batch_size=10, chunk=10) as shared:
        batches = iter(shared.loader())
        before = [*next(batches).tolist(), *next(batches).tolist()]
        next(batches)
        state = shared.state_dict()
    with DHT(start=True) as dht, SharedPass(range(60), dht, "run", batch_size=10, chunk=10) as shared:
        shared.load_state_dict(state)
        after = in_all(shared.loader())
    assert len(after) == 40
    assert set(before) | set(after) == set(range(60))


def test_late_peer_logs_why_it_gets_no_batches(dhts: list[DHT], caplog: pytest.LogCaptureFixture) -> None:
    """A late peer joins there. A run that begins again under its old name gets nothing, either."""
    caplog.set_level(logging.INFO, logger="shoal.data.shared_pass")
    with SharedPass(range(20), dhts[0], "run", batch_size=10, chunk=10) as shared:
        for _ in range(2):
            assert len(in_all(shared.loader())) == 20
    assert caplog.text == ""
    with SharedPass(range(20), dhts[1], "run", batch_size=10, chunk=10) as shared:
        seen = [len(in_all(shared.loader())) for _ in range(3)]
    assert seen == [0, 0, 20]
    # Of what the other one has published, it may have seen only the first pass at first.
    assert re.search(
        "run 'run' is at pass [12] already: the iterations of this peer for pass 0 and up to then have no batches",
        caplog.text,
    )
    assert [record.levelname for record in caplog.records if "have no batches" in record.getMessage()] == ["INFO"]


def test_state_of_other_data_or_order_is_refused(dhts: list[DHT]) -> None:
    """Its chunks have other samples: what was done is not what would be left out."""
    with SharedPass(range(60), dhts[0], "run", chunk=10) as shared:
        state = shared.state_dict()
    for options, says in (
        ({"chunk": 20}, "of 60 samples in chunks of 10, but the data set has 60 in chunks of 20"),
        ({"chunk": 10, "seed": 1}, "the same data in another order"),
        ({"chunk": 10, "shuffle": False}, "the same data in another order"),
    ):
        with SharedPass(range(60), dhts[0], "run", **options) as shared, pytest.raises(ValueError, match=says):
            shared.load_state_dict(state)
    with SharedPass(range(60), dhts[0], "other", chunk=10) as shared:
        with pytest.raises(ValueError, match="the same data in another order"):
            shared.load_state_dict(state)
        for bad in ({}, None, {**state, "number": "3"}, {**state, "done": "text"}, {**state, "number": 2**40}):
            with pytest.raises(ValueError, match=r"this is not the state_dict\(\) of a SharedPass: "):
                shared.load_state_dict(bad)  # type: ignore[arg-type]


def test_later_pass_replaces_saved_progress(dhts: list[DHT]) -> None:
    with SharedPass(range(60), dhts[0], "run", batch_size=10, chunk=10) as shared:
        state = shared.state_dict()
        shared.load_state_dict({**state, "done": b"\x3f"})  # all of the first pass
        shared.load_state_dict({**state, "number": 1, "done": b"\x03"})
        shared.load_state_dict({**state, "done": b"\x3f"})
        assert shared.number == 1
        assert len(in_all(shared.loader())) == 40
        next(iter(shared.loader()))
        with pytest.raises(ValueError, match="in the middle of pass 2, but the state is of pass 5: load it before the"):
            shared.load_state_dict({**state, "number": 5})
        shared.load_state_dict({**state, "number": 1, "done": b"\x3f"})
        assert sorted(in_all(shared.loader())) == list(range(60))


def test_changed_data_set_size_is_refused(dhts: list[DHT]) -> None:
    """Otherwise what is new would never come, and what is gone could not be found."""
    data = list(range(20))
    with SharedPass(data, dhts[0], "run", batch_size=10, chunk=10) as shared:
        assert len(in_all(shared.loader())) == 20
        data.append(20)
        with pytest.raises(ValueError, match="had 20 samples when this SharedPass was made, and now it has 21: "):
            in_all(shared.loader())


def test_different_orders_warn_and_do_not_share(dhts: list[DHT], caplog: pytest.LogCaptureFixture) -> None:
    passes = [SharedPass(range(60), dht, "run", batch_size=10, chunk=10, seed=i) for i, dht in enumerate(dhts)]
    for shared in passes:
        assert sorted(in_all(shared.loader())) == list(range(60))
        shared.shutdown()
    assert "passes over the same data in another order" in caplog.text


@pytest.mark.parametrize("samples", [100, 103])
def test_two_peers_share_a_stream(dhts: list[DHT], samples: int) -> None:
    streams = [Stream(samples) for _ in dhts]
    passes = [SharedPass(stream, dht, "run", batch_size=7, chunk=5) for stream, dht in zip(streams, dhts, strict=True)]
    seen = in_threads([shared.loader() for shared in passes])
    assert sorted(chain(*seen)) == list(range(samples))
    again = in_threads([shared.loader() for shared in passes])
    assert sorted(chain(*again)) == list(range(samples))
    for shared in passes:
        shared.shutdown()


def test_a_stream_is_read_in_order(dhts: list[DHT]) -> None:
    stream = Stream(200)
    with SharedPass(stream, dhts[0], "run", batch_size=10, chunk=10) as shared:
        assert in_all(shared.loader()) == list(range(200))
    assert stream.begun == 1


def test_errors_name_what_is_wrong(dhts: list[DHT]) -> None:
    with pytest.raises(TypeError, match="dht must be a DHT, got None"):
        SharedPass(range(10), None, "run")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dataset must have len\(\) and \[\], or be iterable, got a int"):
        SharedPass(10, dhts[0], "run")
    with pytest.raises(ValueError, match="the data set is empty"):
        SharedPass([], dhts[0], "run")
    with pytest.raises(ValueError, match=r"chunk must be a whole number, at least 1, got 0\.5"):
        SharedPass(range(10), dhts[0], "run", chunk=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk must be a whole number, at least 1, got True"):
        SharedPass(range(10), dhts[0], "run", chunk=True)
    with pytest.raises(ValueError, match="chunk must be at most 2147483647, got 2147483648"):
        SharedPass(range(10), dhts[0], "run", chunk=2**31)
    with pytest.raises(ValueError, match="2000000000 samples in chunks of 2 are more than 268435456 chunks: use larg"):
        SharedPass(range(2_000_000_000), dhts[0], "run", chunk=2)
    with SharedPass(range(10), dhts[0], "run") as shared:
        with pytest.raises(ValueError, match="a SharedPass with run_id 'run' is at work on this DHT already"):
            SharedPass(range(10), dhts[0], "run")
        with pytest.raises(TypeError, match="SharedPass itself decides about batch_size, shuffle"):
            shared.loader(shuffle=True, batch_size=3)
        with pytest.raises(ValueError, match="in_order=False: the batches that the loop has had would not be known"):
            shared.loader(num_workers=2, in_order=False)
        with pytest.raises(TypeError, match="no len"):
            len(shared)  # type: ignore[arg-type]
    with pytest.raises(ReactorError, match="this SharedPass is shut down"):
        next(iter(shared.loader()))
    with SharedPass(Stream(10), dhts[0], "run") as shared:
        with pytest.raises(TypeError, match="a stream has no indices"):
            iter(shared)
        with pytest.raises(TypeError, match="a stream is read in this process, so it cannot have num_workers"):
            shared.loader(num_workers=2)


# --- the simple way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_a_shuffler_is_a_permutation(size: int) -> None:
    place = shuffler(size, "key")
    assert sorted(map(place, range(size))) == list(range(size))


def test_a_shuffler_is_the_same_everywhere() -> None:
    assert list(map(shuffler(10, "run/0/0"), range(10))) == [2, 6, 0, 1, 7, 9, 3, 5, 8, 4]


def test_each_peer_and_iteration_has_its_own_order(dhts: list[DHT]) -> None:
    samplers = [shuffled(range(50), peer) for peer in (*dhts, "another", 7)]
    orders = [tuple(sampler) for sampler in samplers] + [tuple(samplers[0])]
    assert len(set(orders)) == 5
    assert all(sorted(order) == list(range(50)) for order in orders)
    loader: DataLoader[Any] = DataLoader(range(50), sampler=samplers[1], batch_size=10)  # type: ignore[arg-type]
    assert sorted(in_all(loader)) == list(range(50))


def test_a_stream_shuffles_itself() -> None:
    class Shuffling:
        def shuffle(self, seed: int) -> int:
            return seed

    assert shuffled(Shuffling(), "a") == shuffled(Shuffling(), "a") != shuffled(Shuffling(), "b")
    with pytest.raises(TypeError, match="a Stream has neither"):
        shuffled(Stream(3), "a")
