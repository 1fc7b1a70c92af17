"""All targets, one after another."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator, Sequence

from tests.fuzz import conversations, members, parsers, relays, tensors
from tests.fuzz.fuzzing import Outcome, Target, fuzz


def all_targets(victim: conversations.Victim) -> list[Target]:
    """Everything that reads what strangers send."""
    return [
        *parsers.targets(),
        *tensors.targets(),
        *members.targets(),
        *relays.targets(),
        *conversations.targets(victim),
    ]


async def fuzz_all(inputs: int, seed: int, only: Sequence[str] = ()) -> AsyncIterator[Outcome]:
    """Share the inputs out equally.

    Args:
        only: parts of the names of the targets to take; nothing: all of them.
    """
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reported.append(str(report)))
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # a line for each strange value would be a million lines
    victim = conversations.Victim()
    try:
        await victim.start_afresh()
        gc.collect()
        gc.freeze()  # what is here already is no garbage of inputs, and to look through it takes longer than they do
        targets = [each for each in all_targets(victim) if not only or any(part in each.name for part in only)]
        for target in targets:
            yield await fuzz(target, -(-inputs // len(targets)), random.Random(f"{seed} {target.name}"))
            assert not reported, f"{target.name}: errors that reached nobody: {reported[:3]}"
    finally:
        gc.unfreeze()
        await victim.end()
        logging.disable(level)
