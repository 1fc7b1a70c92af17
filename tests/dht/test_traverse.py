"""The walk to the nearest nodes."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter

import pytest

from shoal.dht.routing import DHTID
from shoal.dht.traverse import Answer, Traversal
from tests.dht.virtual_time import in_virtual_time

TARGET = DHTID(0)  # distances to it are the ids themselves


class World:
    """Nodes that know each other without a network: each knows its nearest ones and a few others."""

    def __init__(self, count: int = 300, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.nodes = [DHTID.generate(rng=rng) for _ in range(count)]
        self.knows: dict[DHTID, list[DHTID]] = {}
        for node in self.nodes:
            near = heapq.nsmallest(15, self.nodes, key=node.xor_distance)
            self.knows[node] = list(dict.fromkeys([*near, *rng.sample(self.nodes, min(30, count))]))
        self.dead: dict[DHTID, None] = {}
        self.requests: list[tuple[DHTID, list[DHTID]]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.answer_time = 0.1

    async def ask(self, node: DHTID, targets: list[DHTID]) -> dict[DHTID, Answer] | None:
        self.requests.append((node, targets))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(3 if node in self.dead else self.answer_time)
        self.in_flight -= 1
        if node in self.dead:
            return None
        return {t: Answer(heapq.nsmallest(20, self.knows[node], key=t.xor_distance)) for t in targets}

    def nearest(self, target: DHTID, count: int) -> list[DHTID]:
        alive = [node for node in self.nodes if node not in self.dead]
        return heapq.nsmallest(count, alive, key=target.xor_distance)


async def walk(world: World, targets: list[DHTID], **options) -> dict[DHTID, list[DHTID]]:
    results: dict[DHTID, list[DHTID]] = {}
    finished: Counter[DHTID] = Counter()

    def on_finished(target: DHTID, nearest: list[DHTID]) -> None:
        finished[target] += 1
        results[target] = nearest

    options = {"num_workers": 4, "beam_size": 20, **options}
    await Traversal(targets, lambda target: world.nodes[:5], world.ask, on_finished, **options).run()
    assert finished == Counter(targets), "each query ends once"
    return results


@in_virtual_time
async def test_finds_the_nearest_nodes():
    world = World()
    targets = [DHTID.generate(number) for number in range(20)]
    results = await walk(world, targets)
    for target in targets:
        assert results[target] == world.nearest(target, 20)


@in_virtual_time
async def test_nodes_are_asked_once_with_bounded_concurrency():
    world = World()
    targets = [DHTID.generate(number) for number in range(30)]
    await walk(world, targets, num_workers=3)
    asked = Counter((node, target) for node, targets in world.requests for target in targets)
    assert set(asked.values()) == {1}
    assert world.most_in_flight == 3


@in_virtual_time
async def test_requests_carry_several_queries_within_limits():
    world = World()
    targets = [DHTID.generate(number) for number in range(36)]
    await walk(world, targets)
    assert max(len(targets) for _, targets in world.requests) == 6, "the square root of the number of queries"
    together = len(world.requests)
    world.requests.clear()
    await walk(world, targets, queries_per_call=2)
    assert max(len(targets) for _, targets in world.requests) == 2
    assert len(world.requests) > together


@in_virtual_time
async def test_silent_nodes_are_replaced_by_the_next():
    world = World()
    for node in world.nearest(TARGET, 10)[::2]:
        world.dead[node] = None
    [found] = (await walk(world, [TARGET])).values()
    assert found == world.nearest(TARGET, 20)


@in_virtual_time
async def test_narrow_beam_gets_past_silent_nodes():
    world = World()
    world.dead = dict.fromkeys(world.nearest(TARGET, 12))
    [found] = (await walk(world, [TARGET], beam_size=2, num_workers=1)).values()
    assert found == world.nearest(TARGET, 2)


@in_virtual_time
async def test_readers_ask_different_holders_first():
    world, rng = World(), random.Random(1)
    nearest, firsts = world.nearest(TARGET, 5), Counter()
    everybody = {"num_workers": 1, "num_replicas": 5, "beam_size": 2}
    for _ in range(200):
        world.requests.clear()
        results: dict[DHTID, list[DHTID]] = {}
        draw = rng.getrandbits(160)
        # Most nodes of a swarm know those that are near a key.
        await Traversal([TARGET], lambda _: world.nodes, world.ask, results.__setitem__, draw=draw, **everybody).run()
        first, second = [node for node, _ in world.requests]
        firsts[first] += 1
        assert second == nearest[first == nearest[0]]
    assert set(firsts) == set(nearest)
    assert max(firsts.values()) < 60, "a fifth each, by chance"


@in_virtual_time
@pytest.mark.parametrize("dead", [0, 1, 4])
async def test_drawn_holders_still_lead_to_the_nearest(dead):
    world, rng = World(), random.Random(1)
    world.dead = dict.fromkeys(world.nearest(TARGET, dead))
    await walk(world, [TARGET], beam_size=2, num_workers=1, num_replicas=5)
    straight = len(world.requests)
    for _ in range(20):
        world.requests.clear()
        await walk(world, [TARGET], beam_size=2, num_workers=1, num_replicas=5, draw=rng.getrandbits(160))
        asked = [node for node, _ in world.requests if node not in world.dead]
        assert world.nearest(TARGET, 1)[0] in asked
        assert len(world.requests) <= straight + 5


@in_virtual_time
async def test_enough_responses_end_a_query_early():
    world = World()
    results = await walk(world, [TARGET], enough_responses=5)
    assert results[TARGET][:5] == world.nearest(TARGET, 5)
    few = len(world.requests)
    world.requests.clear()
    await walk(world, [TARGET])
    assert few < len(world.requests) * 0.8


@in_virtual_time
async def test_fewer_nodes_than_the_beam():
    world = World(count=7)
    assert (await walk(world, [TARGET], enough_responses=20))[TARGET] == world.nearest(TARGET, 7)


@in_virtual_time
async def test_nobody_to_ask_and_nothing_to_look_for():
    results = {}

    async def ask(node, targets):
        raise AssertionError("nobody is there")

    walk = Traversal([TARGET], lambda target: [], ask, results.__setitem__, num_workers=4, beam_size=20)
    await walk.run()
    assert results == {TARGET: []}
    await Traversal([], lambda target: [], ask, results.__setitem__, num_workers=4, beam_size=20).run()


@in_virtual_time
async def test_the_own_node_is_never_asked():
    world = World()
    own = world.nearest(TARGET, 1)[0]
    results = await walk(world, [TARGET], own_id=own)
    assert own not in [node for node, _ in world.requests]
    assert results[TARGET] == world.nearest(TARGET, 21)[1:]


@in_virtual_time
async def test_one_query_may_end_before_the_others():
    world = World()
    ended_at: dict[DHTID, float] = {}
    easy, hard = DHTID.generate("easy"), DHTID.generate("hard")
    loop = asyncio.get_running_loop()

    async def ask(node: DHTID, targets: list[DHTID]):
        answers = await world.ask(node, targets)
        return {t: Answer(a.neighbors, is_enough=t == easy) for t, a in answers.items()}

    await Traversal(
        [easy, hard],
        lambda target: world.nodes[:5],
        ask,
        lambda target, nearest: ended_at.__setitem__(target, loop.time()),
        num_workers=4,
        beam_size=20,
    ).run()
    assert ended_at[easy] == pytest.approx(0.1)
    assert ended_at[hard] > 0.3
    assert sum(easy in targets for _, targets in world.requests) <= 4


@in_virtual_time
async def test_finishing_from_outside_ends_only_that_query():
    world = World()
    results: dict[DHTID, list[DHTID]] = {}
    first, second = DHTID.generate(1), DHTID.generate(2)
    walk = Traversal(
        [first, second], lambda t: world.nodes[:5], world.ask, results.__setitem__, num_workers=4, beam_size=20
    )
    running = asyncio.ensure_future(walk.run())
    await asyncio.sleep(0.15)
    walk.finish(first)
    walk.finish(first)
    assert list(results) == [first]
    await running
    assert results[second] == world.nearest(second, 20)


@in_virtual_time
async def test_silent_node_delays_only_its_own_queries():
    world = World()
    world.dead = {world.nodes[0]: None}
    start = asyncio.get_running_loop().time()
    await walk(world, [TARGET], enough_responses=5)
    assert asyncio.get_running_loop().time() - start < 1.5


@in_virtual_time
async def test_silent_nodes_hold_no_places_and_are_replaced():
    world = World()
    loop = asyncio.get_running_loop()
    for node in world.nearest(TARGET, 16)[::2]:
        world.dead[node] = None
    start = loop.time()
    [patient] = (await walk(world, [TARGET])).values()
    assert patient == world.nearest(TARGET, 20)
    assert loop.time() - start > 6, "eight time-outs, four at a time"
    start = loop.time()
    [found] = (await walk(world, [TARGET], stall_after=0.5)).values()
    assert found == patient
    assert 3 < loop.time() - start < 5, "the time-outs overlap, but all of them are waited for"
    start = loop.time()
    [found] = (await walk(world, [TARGET], stall_after=0.5, enough_responses=5)).values()
    assert found[:5] == patient[:5]
    assert loop.time() - start < 3, "others will do"


@in_virtual_time
async def test_slow_nodes_count_when_they_answer_after_all():
    world = World()
    world.answer_time = 10.0
    [found] = (await walk(world, [TARGET], stall_after=0.5)).values()
    assert found == world.nearest(TARGET, 20)
    assert 4 < world.most_in_flight <= 4 + 16, "the number of suspicious requests is limited"
    [found] = (await walk(world, [TARGET], stall_after=0.5, enough_responses=5)).values()
    assert found[:5] == world.nearest(TARGET, 5)


@in_virtual_time
async def test_walk_asks_only_possible_results():
    world = World()
    world.answer_time = 1.0
    in_front = 0

    async def ask(node, targets):
        nonlocal in_front
        in_front = max(in_front, heard_of.index(node) + 1)
        answers = await world.ask(node, targets)
        heard_of[:] = sorted({*heard_of, *answers[TARGET].neighbors}, key=TARGET.xor_distance)
        return answers

    heard_of = sorted(world.nodes[:30], key=TARGET.xor_distance)
    start = list(heard_of)
    await Traversal(
        [TARGET], lambda t: start, ask, lambda *args: None, num_workers=20, beam_size=20, enough_responses=3
    ).run()
    assert in_front == 3


@in_virtual_time
async def test_rest_of_beam_follows_the_nearest_answers():
    world = World()
    loop = asyncio.get_running_loop()
    [slowly] = (await walk(world, [TARGET])).values()
    seconds, requests = loop.time(), len(world.requests)
    start = loop.time()
    [quickly] = (await walk(world, [TARGET], num_replicas=5)).values()
    assert quickly == slowly == world.nearest(TARGET, 20)
    assert loop.time() - start < seconds * 0.75
    assert len(world.requests) - requests <= requests + 5
    assert 4 < world.most_in_flight <= 20


@pytest.mark.parametrize("silent", [0, 1, 2, 3, 5])
@in_virtual_time
async def test_silent_majority_near_the_target_is_awaited(silent):
    world = World()
    for node in [*world.nearest(TARGET, silent), *world.nearest(TARGET, 20)[12:14]]:
        world.dead[node] = None
    start = asyncio.get_running_loop().time()
    [found] = (await walk(world, [TARGET], num_replicas=5, stall_after=0.5)).values()
    assert found == world.nearest(TARGET, 20)
    assert (asyncio.get_running_loop().time() - start > 3) is (silent >= 3)


@in_virtual_time
async def test_cancelled_walk_calls_nobody_back():
    world = World()
    running = asyncio.ensure_future(
        Traversal(
            [TARGET],
            lambda t: world.nodes[:5],
            world.ask,
            lambda *args: pytest.fail("finished"),
            num_workers=4,
            beam_size=20,
        ).run()
    )
    await asyncio.sleep(0.25)
    asked = len(world.requests)
    assert world.in_flight == 4
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(5)
    assert world.in_flight == 0
    assert len(world.requests) == asked


@in_virtual_time
async def test_a_defect_in_asking_is_not_hidden():
    async def ask(node, targets):
        raise ZeroDivisionError("defect")

    with pytest.raises(ZeroDivisionError):
        await Traversal([TARGET], lambda t: [DHTID(1)], ask, lambda *args: None, num_workers=4, beam_size=20).run()


@in_virtual_time
async def test_the_same_seed_gives_the_same_walk():
    worlds = [World(seed=5), World(seed=5)]
    targets = [DHTID.generate(number) for number in range(10)]
    for world in worlds:
        await walk(world, targets)
    assert worlds[0].requests == worlds[1].requests


@in_virtual_time
async def test_invented_nearer_nodes_cannot_prolong_a_walk():
    requests = []

    async def lure(node: DHTID, targets: list[DHTID]):
        requests.append(node)
        return {target: Answer(range(node // 2, node // 2 + 128)) for target in targets}

    await Traversal([TARGET], lambda t: [DHTID(2**159)], lure, lambda *args: None, num_workers=4, beam_size=3).run()
    assert len(requests) == 30
