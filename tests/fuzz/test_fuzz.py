"""Over a thousand hostile inputs, always the same ones. ``python -m tests.fuzz`` tries a million others."""

from __future__ import annotations

import inspect
import random

import pytest

from shoal.testing import run
from tests.fuzz import conversations
from tests.fuzz.fuzzing import Outcome, Target, UnexpectedError, fuzz
from tests.fuzz.hostile_text import Forger
from tests.fuzz.live import besiege
from tests.fuzz.run import all_targets, fuzz_all

INPUTS = 1800
ATTACKS = 120
FORGED_INPUTS = 12

pytestmark = pytest.mark.filterwarnings("ignore::Warning:cryptography", "ignore:Parsed a")


@pytest.mark.timeout(300)  # it only computes, as fast as the machine allows
def test_nothing_but_typed_errors() -> None:
    async def all_outcomes() -> list[Outcome]:
        return [outcome async for outcome in fuzz_all(INPUTS, seed=0)]

    outcomes = run(all_outcomes())
    assert sum(outcome.inputs for outcome in outcomes) >= INPUTS
    for outcome in outcomes:
        assert len(outcome.ends) > 1, f"{outcome.target.name}: all inputs ended alike, which tests little"


@pytest.mark.timeout(300)
def test_errors_say_nothing_that_a_stranger_wrote_as_it_is() -> None:
    """The errors of parsers reach logs and terminals: they have no control characters, and are never long."""

    async def feed_all() -> set[str]:
        ends, victim = set[str](), conversations.Victim()
        await victim.start_afresh()
        try:
            for target in all_targets(victim):
                mutator = Forger(random.Random(target.name))
                if target.start_afresh is not None:
                    await target.start_afresh()
                for _ in range(FORGED_INPUTS):
                    end = target.feed(target.make_input(mutator))
                    ends.add(await end if inspect.isawaitable(end) else end)
                if target.start_afresh is not None:
                    await target.start_afresh()
        finally:
            await victim.end()
        return ends

    assert {"ProtocolError", "ValueError", "NotAMemberError"} <= run(feed_all())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["memory", "tcp"])
async def test_listening_node(kind: str) -> None:
    """Every attack is counted with a reason, honest calls are answered meanwhile, and nothing stays in memory."""
    siege = await besiege(kind, ATTACKS, seed=0)
    assert siege.reasons.total() == siege.attacks == ATTACKS
    if kind == "tcp":
        assert siege.reasons.keys() == {
            "no TLS",
            "closed before the TLS handshake",
            "wrong proof of identity",
            "closed before the proof of identity",
            "closed before the cookie",
            "unknown session",
            "broke the protocol",
        }
    else:
        assert siege.reasons.keys() == {"broke the protocol"}
    assert len(siege.honest_seconds) >= 2


@pytest.mark.timeout(300)
def test_the_fuzzer_finds_what_it_looks_for() -> None:
    kept: list[bytes] = []

    def trip(data: bytes) -> str:
        return "found" if 1 // (data.count(0xFF) - 2) else "read"

    def hoard(data: bytes) -> str:
        kept.append(data * 100)
        return "kept"

    for name, feed, words in [("trip", trip, "ZeroDivisionError"), ("hoard", hoard, "has left")]:
        target = Target(name, lambda mutator: mutator.bytes(bytes(100), [b"\xff" * 9]), feed)
        with pytest.raises(UnexpectedError, match=words):
            run(fuzz(target, 5000, random.Random(0)))
