"""Records of a swarm in many keys: which key holds what, what a sample tells, and that all peers find each other."""

from __future__ import annotations

import random
from collections import Counter
from statistics import fmean

import pytest

from shoal.dht.key_sharding import (
    MAX_DEPTH,
    OWNERS_PER_KEY,
    KeySharding,
    any_place,
    estimate_owners,
    key_at,
    levels_above,
    path_of,
    places_to_write,
)
from shoal.optim.progress.exchange import MOST_READ
from tests.drills import mostly_drills

pytestmark = pytest.mark.xdist_group("spread")


def owner(number: int) -> bytes:
    return b"owner %d" % number


def test_small_swarms_use_one_plain_key():
    spread = KeySharding(owner(0))
    assert spread.places_to_write() == [""]
    assert spread.place_beside(random.Random(0)) is None
    assert key_at("run_progress", spread.place) == "run_progress"
    assert not spread.learn("", [0] * OWNERS_PER_KEY)
    assert spread.size is None
    assert key_at("run_progress", "01") == "run_progress.01"


def test_owners_fill_keys_evenly_and_levels_above_randomly():
    owners = [owner(number) for number in range(4096)]
    counts = Counter(path_of(each)[:4] for each in owners)
    assert len(counts) == 16
    assert max(counts.values()) < 1.3 * min(counts.values())
    above = Counter(levels_above(each, 4) for each in owners)
    for levels, share in ((0, 1 / 2), (1, 1 / 4), (2, 1 / 8), (3, 1 / 16), (4, 1 / 16)):
        assert above[levels] / len(owners) == pytest.approx(share, rel=0.25)
    assert fmean(len(places_to_write(each, 10)) for each in owners) < 2.1, "hardly more than one more key"
    assert all(places[0].startswith(places[-1]) for places in (places_to_write(each, 6) for each in owners))
    assert len({any_place(3, random.Random(seed)) for seed in range(100)}) == 8


def written(depths: dict[bytes, int]) -> dict[str, list[int]]:
    """What stands in each key if each owner has this depth."""
    keys: dict[str, list[int]] = {}
    for each, depth in depths.items():
        for place in places_to_write(each, depth):
            keys.setdefault(place, []).append(depth)
    return keys


@pytest.mark.parametrize("depths", [(5,), (4, 5), (5, 6)])
def test_any_key_tells_how_many_owners_there_are(depths):
    owners = {owner(number): depths[number % len(depths)] for number in range(4000)}
    keys = written(owners)
    for level in range(min(depths) + 1):
        estimates = [estimate_owners(level, found) for place, found in keys.items() if len(place) == level]
        assert fmean(estimates) == pytest.approx(len(owners), rel=0.35)


def test_few_liars_about_depth_change_little():
    honest = [5] * 64
    assert estimate_owners(0, [*honest, MAX_DEPTH, MAX_DEPTH]) < 1.1 * estimate_owners(0, honest)
    assert estimate_owners(3, []) == 0.0


class Swarm:
    """Owners that write and read keys, each a few times in any order."""

    def __init__(self, most_read: int = 0) -> None:
        self.rng, self._most_read = random.Random(1), most_read
        self.spreads: dict[bytes, KeySharding] = {}
        self.moves = 0

    def join(self, count: int) -> None:
        for number in range(len(self.spreads), len(self.spreads) + count):
            self.spreads[owner(number)] = KeySharding(owner(number))

    def leave(self, left: int) -> None:
        self.spreads = dict(list(self.spreads.items())[:left])

    def live(self, periods: int) -> None:
        """In each period everybody reads once; what is written is half a period old."""
        for _ in range(periods):
            owners = list(self.spreads.values())
            self.rng.shuffle(owners)
            for half in (owners[::2], owners[1::2]):
                self.keys = written({name: spread.depth for name, spread in self.spreads.items()})
                for spread in half:
                    self.read(spread)

    def read(self, spread: KeySharding) -> None:
        place = spread.place
        if spread.learn(place, self.depths_in(place)):
            self.moves += 1
            spread.learn(spread.place, self.depths_in(spread.place))
        beside = spread.place_beside(self.rng)
        if beside is not None:
            self.moves += spread.learn(beside, self.depths_in(beside))

    def depths_in(self, place: str) -> list[int]:
        return self.keys.get(place, [])[-self._most_read :]

    def neighbors(self, name: bytes) -> int:
        """How many entries it sees in its key and in the one above."""
        place = self.spreads[name].place
        return len(self.keys.get(place, [])) + (len(self.keys.get(place[:-1], [])) if place else 0)


@pytest.mark.slow_drill
def test_peers_agree_while_a_swarm_grows_and_shrinks():
    swarm = Swarm()
    swarm.join(50)
    for size in (100, 200, 400, 1000, 3000):
        swarm.join(size - len(swarm.spreads))
        swarm.live(6)
        assert min(map(swarm.neighbors, swarm.spreads)) >= min(8, size // 8), "nobody is alone, whatever it believes"
    swarm.moves = 0
    swarm.live(6)
    depths = Counter(spread.depth for spread in swarm.spreads.values())
    assert max(depths) - min(depths) <= 1
    assert max(map(len, swarm.keys.values())) < 5 * OWNERS_PER_KEY
    assert swarm.moves < len(swarm.spreads) / 2, "they do not go to and fro"
    sizes = [spread.size for spread in swarm.spreads.values()]
    assert fmean(size for size in sizes if size is not None) == pytest.approx(3000, rel=0.25)
    for size in (1000, 300, 20):
        swarm.leave(size)
        swarm.live(8)
        assert min(map(swarm.neighbors, swarm.spreads)) >= min(8, size // 2)
    assert {spread.depth for spread in swarm.spreads.values()} == {0}


@pytest.mark.parametrize(("size", "shallow", "deep"), [(200, 1, 2), (800, 3, 4)])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_where_two_depths_fit_all_follow_the_majority(size, shallow, deep, share):
    swarm = Swarm()
    swarm.join(size)
    for number, spread in enumerate(swarm.spreads.values()):
        spread.depth = deep if number % 10 < 10 * share else shallow
    swarm.live(8)
    depths = Counter(spread.depth for spread in swarm.spreads.values())
    assert depths[deep if share > 0.5 else shallow] > 0.95 * size, depths
    assert swarm.moves < 1.5 * size, "they do not go to and fro"


@pytest.mark.parametrize("size", mostly_drills([250, 315, 235, 265, 300], quick=2))
def test_peers_agree_despite_uneven_keys(size):
    swarm = Swarm()
    swarm.join(size)  # about as many as two keys may have at most
    swarm.live(12)
    depths = Counter(spread.depth for spread in swarm.spreads.values())
    assert depths.most_common(1)[0][1] > 0.9 * size, depths
    swarm.moves = 0
    swarm.live(6)
    assert swarm.moves < 0.1 * size, "they do not go to and fro"


@pytest.fixture(scope="module")
def crowd():
    """It has come at once, a while ago; not to be changed."""
    swarm = Swarm()
    swarm.join(2000)
    swarm.live(8)
    return swarm


@pytest.mark.slow_drill
def test_sudden_crowd_divides_the_keys(crowd):
    depths = Counter(spread.depth for spread in crowd.spreads.values())
    assert min(depths) >= 3, depths
    assert max(depths) - min(depths) <= 1, depths


@pytest.mark.slow_drill
def test_reading_slightly_more_than_a_key_suffices(crowd):
    swarm = Swarm(most_read=MOST_READ)
    swarm.join(2000)
    swarm.live(8)
    depths = Counter(spread.depth for spread in swarm.spreads.values())
    assert depths.most_common(1)[0][0] == Counter(each.depth for each in crowd.spreads.values()).most_common(1)[0][0]
    assert max(depths) - min(depths) <= 1, depths


@pytest.mark.slow_drill
def test_a_newcomer_finds_the_depth_at_the_top(crowd):
    newcomer = KeySharding(b"newcomer")  # it reads, and has not written yet
    crowd.read(newcomer)
    assert newcomer.depth >= 1
    for _ in range(3):
        crowd.read(newcomer)
    depths = Counter(spread.depth for spread in crowd.spreads.values())
    assert abs(newcomer.depth - depths.most_common(1)[0][0]) <= 1


def test_one_key_of_invented_records_divides_nothing():
    swarm = Swarm()
    swarm.join(700)
    swarm.live(8)
    victim = next(iter(swarm.spreads.values()))
    depth = victim.depth
    swarm.keys[victim.place] = [depth] * 5000
    for _ in range(4):
        swarm.read(victim)
    assert victim.depth == depth
