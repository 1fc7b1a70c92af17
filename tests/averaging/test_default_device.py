"""Rounds and downloads work in the host's memory, whatever ``torch.set_default_device`` says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal.compression import Float16Compression
from tests.averaging.swarm import Swarm, make_control

pytestmark = pytest.mark.devices


@pytest.mark.parametrize("options", [{}, {"compression": Float16Compression()}], ids=["exact", "compressed"])
async def test_the_default_device_is_no_matter(options: dict[str, Any]) -> None:
    swarm = Swarm()
    tensors = [[torch.full((30_000,), float(i)), torch.full((7,), 2.0 * i)] for i in range(3)]
    with torch.device("meta"):  # what is made there has no values
        for each in tensors:
            await swarm.add(each, target_group_size=3, part_size_bytes=2**16, **options)
        controls = [make_control(node) for node in swarm.nodes]
        await asyncio.gather(*[node.run_step(control) for node, control in zip(swarm.nodes, controls, strict=True)])
        await swarm.close()
    for first, second in tensors:
        assert bool((first == 1).all())
        assert bool((second == 2).all())
