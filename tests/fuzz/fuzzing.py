"""Feeds hostile inputs to a target and keeps count of what became of them."""

from __future__ import annotations

import gc
import inspect
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.mutation import Mutator

SLOWEST_SECONDS = 2.0
"""Processor time that one input may take; the largest message takes milliseconds."""
MAX_GROWTH_BYTES = 2 * 2**20
"""Caches that are not full after half of the inputs may grow by this much."""
INPUTS_PER_FRESH_START = 1000
MOST_CHARACTERS = 1200
"""Of the text of an error."""


def check_text(error: BaseException) -> None:
    """Whatever was refused, the error has one line without terminal codes, and a length that people read."""
    text = str(error)
    assert text.isprintable(), f"an error that strangers can write on a terminal by: {text[:2000]!r}"
    assert len(text) <= MOST_CHARACTERS, f"an error of {len(text)} characters: {text[:2000]!r}"


@dataclass
class Target:
    """Something that reads what strangers send.

    ``feed`` tells in a word or two what became of an input. It lets through only the exceptions that nothing in shoal
    is prepared for.
    """

    name: str
    make_input: Callable[[Mutator], Any]
    feed: Callable[[Any], str | Awaitable[str]]
    start_afresh: Callable[[], Awaitable[None]] | None = None
    """Called now and then, for targets that remember what they have accepted."""


@dataclass
class Outcome:
    """What became of the inputs of one target."""

    target: Target
    inputs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0
    grown_bytes: int = 0
    """What the second half of the inputs has left in memory."""


class UnexpectedError(Exception):
    """An input that something was not prepared for."""


async def fuzz(target: Target, inputs: int, rng: random.Random) -> Outcome:
    """Feed a number of inputs.

    Raises:
        UnexpectedError: an exception came out that must not, or an input took too long; the text has the input. Or
            memory grows with the number of inputs.
    """
    outcome = Outcome(target)
    mutator = Mutator(rng)
    tracemalloc.start()
    try:
        await _feed(outcome, mutator, inputs // 2)
        before = _held_bytes()
        await _feed(outcome, mutator, inputs - inputs // 2)
        outcome.grown_bytes = _held_bytes() - before
    finally:
        tracemalloc.stop()
    if outcome.grown_bytes > MAX_GROWTH_BYTES:
        raise UnexpectedError(f"{target.name}: the second half of the inputs has left {outcome.grown_bytes} bytes")
    return outcome


def _held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _feed(outcome: Outcome, mutator: Mutator, inputs: int) -> None:
    target = outcome.target
    for number in range(inputs):
        if number % INPUTS_PER_FRESH_START == 0 and target.start_afresh is not None:
            await target.start_afresh()
            gc.collect()  # the garbage of a thousand inputs is not what one of them costs
        hostile = target.make_input(mutator)
        before = time.thread_time()
        try:
            end = target.feed(hostile)
            if inspect.isawaitable(end):
                end = await end
        except Exception as e:
            raise UnexpectedError(f"{target.name}: {type(e).__name__}: {e}, input {hostile!r}") from e
        seconds = time.thread_time() - before
        if seconds > SLOWEST_SECONDS:
            raise UnexpectedError(f"{target.name}: {seconds:.1f} s of processor time, input {hostile!r}")
        outcome.slowest_seconds = max(outcome.slowest_seconds, seconds)
        outcome.ends[end] += 1
        outcome.inputs += 1
    if target.start_afresh is not None:
        await target.start_afresh()


def print_outcomes(outcomes: Iterable[Outcome]) -> None:
    """A table: for each target how many inputs ended in which way."""
    total, ends = 0, Counter[str]()
    for outcome in outcomes:
        slowest = f"slowest {1e3 * outcome.slowest_seconds:6.1f} ms"
        grown = f"grown {outcome.grown_bytes / 1024:5.0f} KiB"
        print(f"  {outcome.target.name:<32} {outcome.inputs:>9,}   {slowest}   {grown}   {_as_text(outcome.ends)}")
        total += outcome.inputs
        ends.update(outcome.ends)
    print(f"  {'all':<32} {total:>9,}   {'':<35}   {_as_text(ends)}")


def _as_text(ends: Counter[str]) -> str:
    return ", ".join(f"{end} {count:,}" for end, count in ends.most_common())
