"""The loop with virtual time: order, speed, and what it says when a program cannot end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from shoal.base.clock import get_dht_time
from shoal.base.tasks import run_in_worker
from shoal.testing import START_OF_TIME, Machine, SimulationError, VirtualTimeLoop, run


def test_days_pass_in_no_time():
    async def main():
        await asyncio.sleep(6 * 86400)
        return asyncio.get_running_loop().time()

    begun = time.perf_counter()
    assert run(main()) == 6 * 86400
    assert time.perf_counter() - begun < 5


def test_dht_time_is_that_of_the_loop():
    async def main(start):
        assert get_dht_time() == start
        await asyncio.sleep(7.5)
        assert get_dht_time() == start + 7.5

    run(main(START_OF_TIME))
    run(main(1234.0), start_time=1234.0)


def test_clock_of_a_machine_may_be_off():
    async def main():
        late, early = Machine(), Machine()
        late.clock_offset, early.clock_offset = -120.0, 0.25

        async def times():
            nested = asyncio.ensure_future(asyncio.sleep(0, get_dht_time()))  # what a task starts runs there, too
            return get_dht_time(), await nested, Machine.current()

        assert await late.spawn(times()) == (START_OF_TIME - 120, START_OF_TIME - 120, late)
        assert await early.spawn(times()) == (START_OF_TIME + 0.25, START_OF_TIME + 0.25, early)
        assert await times() == (START_OF_TIME, START_OF_TIME, None)
        assert late.dht_time() == START_OF_TIME - 120

    run(main())


def test_thawed_machine_continues_in_order():
    async def main():
        frozen, other, order = Machine(), Machine(), []
        asked: asyncio.Queue[str] = asyncio.Queue()

        async def answer():
            while True:
                order.append((asyncio.get_running_loop().time(), await asked.get()))

        async def tick(name):
            for _ in range(3):
                await asyncio.sleep(1)
                order.append((asyncio.get_running_loop().time(), name))

        answering = frozen.spawn(answer())
        ticking = [frozen.spawn(tick("frozen")), other.spawn(tick("other"))]
        await asyncio.sleep(1.5)
        frozen.freeze()
        frozen.freeze()
        asked.put_nowait("question")
        await asyncio.sleep(10)
        assert order == [(1, "frozen"), (1, "other"), (2, "other"), (3, "other")]
        del order[:]
        frozen.thaw()
        frozen.thaw()
        await asyncio.wait(ticking)
        assert order == [(0, "question"), (11.5, "frozen"), (12.5, "frozen")]
        answering.cancel()

    run(main())


def test_callbacks_run_in_order():
    async def main():
        loop, order = asyncio.get_running_loop(), []
        for name, when in (("c", 2), ("a", 1), ("d", 2), ("b", 1), ("now", 0), ("past", -5)):
            loop.call_at(when, order.append, name)
        for number in range(20):  # many at the same time: a heap alone would mix them up
            loop.call_at(3, order.append, number)
        loop.call_soon(order.append, "soon")
        await asyncio.sleep(10)
        assert order == ["soon", "past", "now", "a", "b", "c", "d", *range(20)]

    run(main())


def test_due_timers_run_with_ready_callbacks():
    async def main():
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0, event.set)
        while not event.is_set():
            await asyncio.sleep(0)

    run(main())


def test_cancelled_timers_take_neither_time_nor_memory():
    async def main():
        loop = asyncio.get_running_loop()
        loop.call_at(1000, pytest.fail).cancel()
        await asyncio.sleep(1)
        assert loop.time() == 1
        for _ in range(20_000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0)
        assert len(loop.timers) < 5000
        await asyncio.sleep(2 * 3600)

    run(main())


def test_time_limits_end_waiting():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() == 5

    run(main())


def test_work_for_threads_is_done_inline():
    def work(number):
        return number + 1, threading.get_ident()

    async def main():
        assert await run_in_worker(work, 1) == (2, threading.get_ident())
        assert await asyncio.to_thread(work, 2) == (3, threading.get_ident())
        with pytest.raises(ZeroDivisionError):
            await run_in_worker(lambda: 1 / 0)
        assert asyncio.get_running_loop().time() == 0

    run(main())


def test_deadlock_is_reported_with_what_waits():
    async def waits_in_vain():
        await asyncio.Event().wait()

    async def main():
        await asyncio.sleep(1.5)
        task = asyncio.get_running_loop().create_task(waits_in_vain(), name="the sleeper")
        await task

    with pytest.raises(SimulationError, match=r"1\.500 s: deadlock(.|\n)*the sleeper: .*waits_in_vain.*locks.py"):
        run(main())


def test_circles_are_reported_with_what_runs(monkeypatch):
    monkeypatch.setattr("shoal.testing.loop.MAX_ROUNDS_AT_ONE_MOMENT", 1000)

    async def runs_in_circles():
        while True:
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(runs_in_circles(), asyncio.sleep(100))

    with pytest.raises(SimulationError, match=r"endless loop(.|\n)*runs_in_circles"):
        run(main())


def test_what_never_ends_is_reported():
    async def main():
        while True:
            await asyncio.sleep(10)

    with pytest.raises(SimulationError, match=r"no end within the time limit of 100 s(.|\n)*main"):
        run(main(), time_limit=100)


def test_errors_and_results_come_through():
    async def fails():
        raise KeyError("why")

    async def succeeds():
        return 5

    with pytest.raises(KeyError, match="why"):
        run(fails())
    assert run(succeeds()) == 5


def test_what_is_left_is_cancelled_in_order():
    ended = []

    async def background(number):
        try:
            await asyncio.sleep(1000 - number)
        finally:
            await asyncio.sleep(1)  # cleaning up takes its time
            ended.append(number)

    async def main():
        tasks = [asyncio.ensure_future(background(number)) for number in range(50)]
        await asyncio.sleep(1)
        return len(tasks)

    assert run(main()) == 50
    assert ended == list(range(50))


def test_stubborn_tasks_do_not_block_the_end():
    async def stubborn():
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def main():
        task = asyncio.ensure_future(stubborn())
        await asyncio.sleep(1)
        return task

    assert not run(main()).done()


def test_is_refused_inside_a_loop():
    async def main():
        inner = asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="inside a running event loop"):
            run(inner)

    asyncio.run(main())


def test_other_threads_are_refused():
    async def main():
        loop, errors = asyncio.get_running_loop(), []

        def other_thread():
            try:
                loop.call_soon_threadsafe(print)
            except SimulationError as e:
                errors.append(e)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert len(errors) == 1

    run(main())


def test_tasks_of_a_machine_are_known_in_order():
    async def main():
        loop, machine = asyncio.get_running_loop(), Machine()
        assert isinstance(loop, VirtualTimeLoop)

        async def family():
            children = [asyncio.ensure_future(asyncio.sleep(5)) for _ in range(3)]
            for _ in range(300):  # so many that those that have ended are forgotten
                await asyncio.ensure_future(asyncio.sleep(0))
            await asyncio.sleep(1)
            return children

        stranger = asyncio.ensure_future(asyncio.sleep(5))
        parent = machine.spawn(family())
        await asyncio.sleep(0.5)
        assert loop.unfinished_tasks(machine)[0] is parent
        children = await parent
        assert loop.unfinished_tasks(machine) == children
        assert stranger in loop.unfinished_tasks()

    run(main())


def test_seed_decides_what_is_random():
    async def main():
        return asyncio.get_running_loop().rng.random()

    assert run(main(), seed=1) == run(main(), seed=1)
    assert run(main(), seed=1) != run(main(), seed=2)
