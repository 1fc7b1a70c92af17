"""The search for the best experts of a grid, on real DHT peers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from shoal import DHT
from shoal.moe import beam_search
from shoal.moe.beam_search import MoEBeamSearcher
from shoal.moe.declare import declare_experts
from shoal.moe.uids import ExpertInfo
from tests.moe.swarms import soon, swarm


def uids_of(experts: object) -> list[str]:
    return [each.uid for each in experts]  # type: ignore[attr-defined]


def test_search_of_a_full_grid_equals_an_exhaustive_one() -> None:
    rng = np.random.default_rng(0)
    with swarm(2) as [server, client]:
        every = [*itertools.product(range(5, 12), range(3), range(8, 13))]
        declare_experts(server, [f"expert.{i}.{j}.{k}" for i, j, k in every], soon())
        searcher = MoEBeamSearcher(client, "expert", grid_size=(16, 4, 16))
        for _ in range(10):
            scores = [rng.normal(size=16), rng.normal(size=4), rng.normal(size=16)]
            best = sorted((scores[0][i] + scores[1][j] + scores[2][k] for i, j, k in every), reverse=True)[:4]
            found = [[int(n) for n in uid.split(".")[1:]] for uid in uids_of(searcher.find_best_experts(scores, 4))]
            assert np.allclose(best, [scores[0][i] + scores[1][j] + scores[2][k] for i, j, k in found])


def test_batch_gets_what_each_sample_would_get() -> None:
    rng = np.random.default_rng(1)
    with swarm(8, cache_nearest=2) as dhts:
        chosen = random.Random(0).sample([*itertools.product(range(32), repeat=3)], 64)
        for dht, part in zip(dhts, [chosen[n::8] for n in range(8)], strict=True):
            declare_experts(dht, [f"e.{i}.{j}.{k}" for i, j, k in part], soon())
        searcher = MoEBeamSearcher(dhts[3], "e.", (32, 32, 32), num_workers=4)
        batch = [rng.normal(size=(16, 32)).astype(np.float32) for _ in range(3)]
        together = searcher.batch_find_best_experts(batch, 4, return_future=True).result(60)
        one_by_one = [searcher.find_best_experts([each[n] for each in batch], 4) for n in range(16)]
        assert [*map(uids_of, together)] == [*map(uids_of, one_by_one)]
        assert {len(each) for each in together} == {4}
        owners = {f"e.{i}.{j}.{k}": dhts[n].peer_id for n in range(8) for i, j, k in chosen[n::8]}
        assert all(expert.peer_id == owners[expert.uid] for experts in together for expert in experts)


def test_initial_beam_and_successors() -> None:
    with swarm(1) as [dht]:
        declare_experts(
            dht, ["expert.0.1", "expert.1.1", "expert.1.2", "expert.2.0", "expert.1.9", "other.1.1"], soon()
        )
        dht.store("expert.1.", ("expert.2.3", dht.peer_id.to_base58()), soon(), subkey=3)
        dht.store("expert.1.", "nonsense", soon(), subkey=4)
        searcher = MoEBeamSearcher(dht, "expert.", (4, 4))
        beam = searcher.get_initial_beam([0.0, 2.0, 1.0, 3.0], beam_size=3)
        assert [(score, prefix) for score, prefix, _ in beam] == [
            *[(2.0, "expert.1."), (1.0, "expert.2."), (0.0, "expert.0.")]
        ]
        one = {n: ExpertInfo(f"expert.1.{n}", dht.peer_id) for n in (1, 2)}
        assert beam[0][2] == {**one, 9: ExpertInfo("expert.1.9", dht.peer_id)}
        successors = searcher.get_active_successors(["expert.1.", "expert.3."], grid_size=4)
        assert successors == {"expert.1.": one, "expert.3.": {}}
        assert uids_of(searcher.find_best_experts([[0, 2, 1, 3], [-1, 1, 2, 9]], 10)) == [
            *["expert.1.2", "expert.1.1", "expert.0.1", "expert.2.0"]
        ]
        excluded = [[0, -float("inf"), 1, 3], [0, -float("inf"), 2, 9]]
        assert uids_of(searcher.find_best_experts(excluded, 10)) == ["expert.2.0"]
        for wrong in ("expert.1.", ["expert.1"], ["expert.01."]):
            with pytest.raises(AssertionError, match=r"list of prefixes|not a valid prefix"):
                searcher.get_active_successors(wrong)
        with pytest.raises(AssertionError, match="2 dimensions, got 1"):
            searcher.find_best_experts([[0.0] * 4], 4)
        with pytest.raises(AssertionError, match="must be positive, got 0"):
            searcher.batch_find_best_experts([[[0.0] * 4]] * 2, 0)
        with pytest.raises(AssertionError, match="not a valid prefix"):
            MoEBeamSearcher(dht, "expert.01", (4, 4))


def test_experts_of_another_grid_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with swarm(1) as [dht]:
        declare_experts(dht, ["e.0.1", "e.1.1.1"], soon())
        assert uids_of(MoEBeamSearcher(dht, "e.", (2, 2)).find_best_experts([[0.0, 1.0]] * 2, 4)) == ["e.0.1"]
    assert "expert e.1.1.1 has 3 numbers, and the grid e.2.2: give either another prefix" in caplog.text


def test_nothing_alive_gives_an_empty_list() -> None:
    with swarm(1) as [dht]:
        for dimensions in (1, 2, 3):
            searcher = MoEBeamSearcher(dht, "e.", (3,) * dimensions)
            assert searcher.find_best_experts([[0.0] * 3] * dimensions, 2) == []
            assert searcher.batch_find_best_experts([np.zeros((2, 3))] * dimensions, 2) == [[], []]


def test_empty_prefixes_are_marked_for_others_until_the_configured_time() -> None:
    with swarm(3, cache_locally=False) as [server, client, other]:
        declare_experts(server, ["ffn.1.10", "ffn.3.30"], soon())
        searcher = MoEBeamSearcher(client, "ffn.", (10, 32), num_workers=2, cache_expiration=200)
        assert len(searcher.get_initial_beam([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], beam_size=3)) == 2
        found = {n: other.get(f"ffn.{n}.", latest=True) for n in range(10)}
        assert [n for n in range(10) if found[n] is not None] == [0, 1, 2, 3, 4, 5]
        assert [*found[1].value] == [10], "a prefix with experts is not marked"  # type: ignore[union-attr]
        mark = found[0].value[-1]  # type: ignore[union-attr]
        assert mark.value is None
        assert soon(150) < mark.expiration_time < soon(200)


def test_copies_of_marks_hide_no_new_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_search, "EMPTY_SECONDS", 0.0)
    with swarm(8, num_replicas=1) as [server, *others]:
        searchers = [MoEBeamSearcher(dht, "ffn.", (1, 9)) for dht in others]
        for _ in range(2):
            assert not any(searcher.get_initial_beam([6.0], beam_size=1) for searcher in searchers)
        declare_experts(server, ["ffn.0.7"], soon())
        for searcher in searchers:
            [(_, _, successors)] = searcher.get_initial_beam([6.0], beam_size=1)  # type: ignore[misc]
            assert [*successors] == [7]


def declared(dht: DHT, uid: str) -> None:
    assert all(declare_experts(dht, [uid], soon()).values())


def test_marks_of_a_flat_grid_do_not_refuse_experts() -> None:
    with swarm(2) as [server, client]:
        searcher = MoEBeamSearcher(client, "f.", (3,), cache_expiration=1000)
        declared(server, "f.1")
        assert uids_of(searcher.find_best_experts([[3.0, 2.0, 1.0]], 2)) == ["f.1"]
        declared(server, "f.0")
        assert uids_of(searcher.find_best_experts([[3.0, 2.0, 1.0]], 2)) == ["f.1"], "this searcher remembers"
        again = MoEBeamSearcher(client, "f.", (3,))
        assert uids_of(again.find_best_experts([[3.0, 2.0, 1.0]], 2)) == ["f.0", "f.1"]


def test_unusable_experts_are_the_last_resort() -> None:
    avoided = {"e.0.0"}
    with swarm(1) as [dht]:
        declare_experts(dht, ["e.0.0", "e.0.1"], soon())
        searcher = MoEBeamSearcher(
            dht, "e.", (2, 2), negative_caching=False, is_usable=lambda info: info.uid not in avoided
        )
        scores = [[1.0, 0.0], [1.0, 0.0]]
        assert uids_of(searcher.find_best_experts(scores, 2)) == ["e.0.1"]
        avoided.add("e.0.1")
        assert uids_of(searcher.find_best_experts(scores, 2)) == ["e.0.0", "e.0.1"]
        declare_experts(dht, ["e.1.1"], soon())
        assert uids_of(searcher.find_best_experts(scores, 1)) == ["e.1.1"], "they take no places of others"
