"""What others are told by an averager that leaves while it looks for a group."""

from __future__ import annotations

import asyncio
import gc

import torch

from shoal.errors import DHTError
from tests.averaging.swarm import Swarm, make_control, until


async def start_a_search(node):
    """The averager looks for a group, and has told the table so."""
    step = asyncio.ensure_future(node.run_step(make_control(node)))
    matchmaking = node.lanes[""].matchmaking
    await until(lambda: matchmaking._search is not None and matchmaking._search.declared.is_set())
    return step


async def test_an_averager_that_closes_while_it_looks_for_a_group_has_withdrawn():
    swarm = Swarm()
    get = swarm.table.get

    async def get_and_be_slow_to_stop(*args, **kwargs):
        try:
            await asyncio.sleep(60)
            return await get(*args, **kwargs)
        finally:
            await asyncio.sleep(0.1)

    swarm.table.get = get_and_be_slow_to_stop
    node = await swarm.add([torch.zeros(4)])
    step = await start_a_search(node)
    step.cancel()
    await node.close()
    (record,) = (entry for key, entries in swarm.table.records.items() if "0b" in key for entry in entries.values())
    assert record.value is None
    await swarm.close()


async def test_a_table_that_is_closed_before_is_no_failure_that_nobody_has_seen():
    swarm = Swarm()
    unseen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(str(context)))
    node = await swarm.add([torch.zeros(4)])
    step = await start_a_search(node)

    async def refuse(*_, **__):
        raise DHTError("the search was ended: this node is being shut down")

    swarm.table.store = refuse
    step.cancel()
    await asyncio.wait([step])
    await until(lambda: not node.lanes[""].matchmaking._background)
    gc.collect()
    assert unseen == []
    del swarm.table.store
    await swarm.close()
