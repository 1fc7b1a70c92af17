"""Peers of a swarm whose settings differ, and peers that have mistyped their run, in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.base.clock import get_dht_time
from shoal.dht.crypto import tag_of
from shoal.errors import SettingsMismatch
from shoal.monitor.observer import Observer
from shoal.monitor.run import RunView
from shoal.optim.progress import run_list
from shoal.optim.progress.exchange import SETTINGS_AT_ONCE
from shoal.optim.progress.run_list import KEEPERS, KEY, MAX_NAME_BYTES, RunList, describe_runs, read_runs
from shoal.optim.progress.run_settings import PATIENCE, TENSORS, Company, RunSettings
from shoal.p2p import P2P, Identity
from shoal.testing import Host, Link, Network, SharedTable, run
from tests.drills import mostly_drills
from tests.simulation.trackers import Tracked

LINK = Link(delay=(0.02, 0.1), jitter=0.01, dial_failure=0.01)

pytestmark = pytest.mark.parametrize("seed", mostly_drills([1, 2, 3]))


def settings(model: str = "small", target: int = 4096, kind: str = "Optimizer") -> RunSettings:
    return RunSettings(kind, {TENSORS: model}, {"target_batch_size": str(target)})


class Peer(Tracked):
    """Makes a sample each second, until it stops because it does not fit."""

    def __init__(self, host: Host, p2p: P2P, table: SharedTable, own: RunSettings, run_id: str = "run") -> None:
        super().__init__(host, p2p, table)
        self.error: SettingsMismatch | None = None
        self.company = self.board.company = Company(run_id, own)
        self.exchange.runs = RunList(table, p2p, run_id, self.board)
        self.exchange.key = f"{run_id}_progress"

    async def live(self) -> None:
        await self.exchange.start()
        await asyncio.sleep(1.0)
        while self.error is None:
            try:
                self.company.look(
                    lambda: self.board.present(self.host.dht_time()),
                    self.board.last_members,
                    self.host.dht_time(),
                    self.p2p.host_of,
                )
            except SettingsMismatch as e:
                self.error = e
                await self.exchange.stop()
                return
            self.report(self.board.own.samples_accumulated + 1)
            await asyncio.sleep(1.0)


class Run:
    """Peers on a network of their own."""

    def __init__(self) -> None:
        self.network, self.table, self.peers = Network(LINK), SharedTable(delay=0.1), list[Peer]()

    async def add(self, *many: RunSettings, run_id: str = "run") -> list[Peer]:
        new = []
        for own in many:
            host = self.network.add_host()
            p2p = await host.run(P2P.create(transport=host.transport(), rng=host.rng))
            new.append(Peer(host, p2p, self.table, own, run_id))
            host.spawn(new[-1].live())
        self.peers += new
        return new

    async def close(self) -> None:
        for peer in self.peers:
            if peer.host.is_up:
                await peer.host.run(peer.exchange.stop())


def test_the_wrong_newcomer_stops_and_the_run_does_not(seed, caplog):
    async def main() -> None:
        swarm = Run()
        healthy = await swarm.add(*[settings()] * 6)
        await asyncio.sleep(30)
        [wrong] = await swarm.add(settings("large"))
        [other_target] = await swarm.add(settings(target=64))
        await asyncio.sleep(PATIENCE - 10)
        assert other_target.error is not None
        assert other_target.error.differences == ["target_batch_size is 64 here and 4096 there"]
        assert wrong.error is None, "others that fit may come"
        assert all(peer.expected == len(healthy) for peer in healthy), "nobody waits for it"
        await asyncio.sleep(25)
        assert wrong.error is not None
        assert len(wrong.error.peers) == len(healthy)
        await asyncio.sleep(2 * PATIENCE)
        assert all(peer.error is None for peer in healthy)
        await swarm.close()

    run(main(), seed=seed)
    lines = [line for line in caplog.messages if "other settings than this one" in line]
    assert len(lines) <= 6 * 2, "each difference once, at each peer"


def test_the_larger_of_two_sides_wins_even_if_it_came_later(seed):
    async def main() -> None:
        swarm = Run()
        [first] = await swarm.add(settings("large"))
        await asyncio.sleep(20)
        rest = await swarm.add(*[settings("small")] * 3)
        await asyncio.sleep(2 * PATIENCE)
        assert first.error is not None
        assert all(peer.error is None for peer in rest)
        await swarm.close()

    run(main(), seed=seed)


def test_peers_begin_in_any_order_and_only_those_that_do_not_fit_stop(seed):
    async def main() -> None:
        rng, swarm = random.Random(seed), Run()
        kinds = [settings()] * 5 + [settings("large"), settings(target=1), settings(kind="DiLoCo")]
        rng.shuffle(kinds)
        for kind in kinds:
            await swarm.add(kind)
            await asyncio.sleep(rng.choice([0.0, 1.0, 15.0]))
        await asyncio.sleep(3 * PATIENCE)
        for peer in swarm.peers:
            assert (peer.error is None) is (peer.company.own == settings()), peer.company.own
        await swarm.close()

    run(main(), seed=seed)


def test_settings_are_told_to_a_few_peers_at_a_time(seed):
    """They may take some hundred kilobytes, and anybody may ask."""

    async def main() -> None:
        swarm = Run()
        [one, liar] = await swarm.add(settings(), settings("large"))
        await asyncio.sleep(5)
        stub = liar.exchange.get_stub(liar.p2p, one.p2p.peer_id, namespace=liar.exchange.key)

        async def ask() -> list[object]:
            many = [stub.rpc_exchange_settings(settings("large")) for _ in range(3 * SETTINGS_AT_ONCE)]
            return await asyncio.gather(*many, return_exceptions=True)

        answers = await liar.host.run(ask())
        told = [answer for answer in answers if isinstance(answer, RunSettings)]
        assert 0 < len(told) < 2 * SETTINGS_AT_ONCE
        await swarm.close()

    run(main(), seed=seed)


# --- the list of runs -------------------------------------------------------------------------------------------------


def test_a_peer_that_has_mistyped_its_run_is_told_which_there_are(seed, caplog):
    async def main() -> None:
        swarm = Run()
        await swarm.add(*[settings()] * 12, run_id="digits")
        await swarm.add(*[settings()] * 2, run_id="words")
        await asyncio.sleep(60)
        listed = await read_runs(swarm.table)
        assert listed.keys() == {"digits", "words"}
        assert KEEPERS <= len(listed["digits"]) < 12
        caplog.clear()
        await swarm.add(settings(), run_id="digitss")
        await asyncio.sleep(40)
        lines = [line for line in caplog.messages if "run_id" in line]
        assert lines == ["12 peers here train 'digits', 2 peers here train 'words', none 'digitss'. Is run_id right?"]
        view = RunView("digitz")
        await asyncio.wait_for(Observer(swarm.table, view).name_other_runs(), 30)
        [event] = view.events.since()
        assert event.text.startswith("12 peers here train 'digits', 2 peers here train 'words', ")
        assert event.text.endswith("none 'digitz'. Check --run; private runs are not listed")
        await swarm.close()
        assert await read_runs(swarm.table) == {}, "all have left"

    run(main(), seed=seed)


def test_the_list_stays_small_and_fresh(seed, monkeypatch):
    monkeypatch.setattr(run_list, "LIFETIME", 180.0)
    monkeypatch.setattr(run_list, "PERIOD", 60.0)

    async def main() -> None:
        swarm = Run()
        peers = await swarm.add(*[settings()] * 12, run_id="digits")
        await asyncio.sleep(60)
        keepers = (await read_runs(swarm.table))["digits"]
        assert KEEPERS <= len(keepers) < 12
        for peer in peers:
            if peer.p2p.peer_id in keepers:
                peer.host.crash()
        await asyncio.sleep(2 * run_list.LIFETIME)
        renewed = (await read_runs(swarm.table))["digits"]
        assert renewed.keys().isdisjoint(keepers), "others have taken over"
        assert len(renewed) >= 1
        await swarm.close()

    run(main(), seed=seed)


def test_a_swarm_without_other_runs_is_told_so(seed):
    async def main() -> None:
        view = RunView("digits")
        await Observer(SharedTable(), view).name_other_runs()
        [event] = view.events.since()
        assert event.text == "no run is listed here: nobody trains 'digits'. Check --run; private runs are not listed"

    run(main(), seed=seed)


def test_records_of_liars_are_skipped_and_their_texts_are_shown_on_one_line(seed):
    async def main() -> None:
        table, until = SharedTable(), get_dht_time() + 100
        tag = tag_of(Identity.generate().peer_id)
        for subkey in (
            b"\xff\xfe" + tag, b"no owner", tag, b"x" * (MAX_NAME_BYTES + 1) + tag, 5, "text",
            b"two owners" + tag + tag, b"[owner:nobody]" + tag,
        ):  # fmt: skip
            await table.store(KEY, 3, until, subkey=subkey)
        for number, value in enumerate([None, -1, 0, "many", 2.5, True]):
            await table.store(KEY, value, until, subkey=f"run {number}".encode() + tag)
        await table.store(KEY, 3, get_dht_time() + 80_000, subkey=b"for ever" + tag)
        assert await read_runs(table) == {}
        await table.store(KEY, 10**30, until, subkey=b"\x1b[2J\nevil" + tag)
        [line] = describe_runs(await read_runs(table))
        assert line == "1000000 peers here train ' [2J evil'"
        for number in range(20):
            await table.store(KEY, 1, until + 1, subkey=f"run {number}".encode() + tag)
        told = describe_runs(await read_runs(table))
        assert len(told) == 6
        assert told[-1] == "there are 16 more runs"

    run(main(), seed=seed)
