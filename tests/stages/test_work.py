"""The table of works against any order of events: nothing counts twice, its bounds hold, and nothing stays for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.stages.work import UNDER_WAY, Acceptance, Door, MicrobatchID, Phase, Work, Works

WAITING, MAX_BYTES, PATIENCE = 2, 1000, 10.0
IDENTITIES = [MicrobatchID(b"driver", number) for number in range(5)]
DOOR = Door(epoch=1)


class AnyOrder(RuleBasedStateMachine):
    """Callers ask and leave, tensors come, and works go on, in any order and at any time."""

    calls = Bundle("calls")

    @initialize()
    def begin(self) -> None:
        self.works = Works(MAX_BYTES, PATIENCE)
        self.works.most_waiting = WAITING
        self.now = 0.0
        self.callers: Counter[int] = Counter()
        self.begun: Counter[MicrobatchID] = Counter()
        self.counted: Counter[MicrobatchID] = Counter()

    @rule(target=calls, identity=st.sampled_from(IDENTITIES), trains=st.booleans())
    def ask(self, identity: MicrobatchID, trains: bool) -> Any:
        room, known = self.works.room, {work.identity: work for work in self.works}
        code, work = self.works.ask(identity, 1, trains, DOOR)
        if work is None:
            assert code in (Acceptance.BUSY, Acceptance.GONE)
            assert code is not Acceptance.BUSY or not room
            assert code is not Acceptance.GONE or self.counted[identity]
            return [None]
        assert (code is Acceptance.ACCEPTED) == (work.phase is Phase.RESERVED)
        if code is Acceptance.KNOWN or known.get(identity) is work:
            assert known[identity] is work
        self.callers[id(work)] += 1
        return [work]

    @rule(call=calls, nbytes=st.integers(0, 600))
    def receive(self, call: list[Work | None], nbytes: int) -> None:
        if call[0] is not None and self.works.receive(call[0], nbytes):
            self.begun[call[0].identity] += 1

    @rule(call=calls, is_served=st.booleans())
    def leave(self, call: list[Work | None], is_served: bool) -> None:
        work, call[0] = call[0], None
        if work is None:
            return
        self.callers[id(work)] -= 1
        if self.works.leave(work, self.now, is_served=is_served):
            assert not self.callers[id(work)]
            assert is_served or work.phase in (Phase.RESERVED, Phase.FAILED)
            self.works.remove(work)

    @precondition(lambda self: any(work.phase in UNDER_WAY for work in self.works))
    @rule(data=st.data(), fails=st.booleans(), nbytes=st.integers(0, 600))
    def go_on(self, data: st.DataObject, fails: bool, nbytes: int) -> None:
        work = data.draw(st.sampled_from([work for work in self.works if work.phase in UNDER_WAY]))
        if fails:
            self.counted[work.identity] -= work.counts
            self.works.advance(work, Phase.FAILED, 0)
            return
        following = {Phase.FORWARD: Phase.WAITING, Phase.WAITING: Phase.BACKWARD, Phase.BACKWARD: Phase.DONE}
        self.works.advance(work, following[work.phase], nbytes)
        if work.phase is Phase.BACKWARD and work.trains:
            self.counted[work.identity] += 1

    @rule(seconds=st.floats(0, 2 * PATIENCE))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        for work in self.works.expired(self.now):
            assert not work.callers
            self.works.remove(work)

    @invariant()
    def bounds_hold(self) -> None:
        works = list(self.works)
        assert sum(work.phase in (Phase.RESERVED, Phase.FORWARD) for work in works) <= WAITING
        assert all(work.callers == self.callers[id(work)] for work in works)
        assert all((work.left_at is None) == bool(work.callers) for work in works)
        assert self.works.nbytes == sum(work.nbytes for work in works)
        assert max(self.counted.values(), default=0) <= 1
        assert self.works.holds(1) == any(work.trains and work.phase in UNDER_WAY for work in works)
        assert not self.works.holds(0)

    def teardown(self) -> None:
        for work in self.works:
            while work.callers:
                if self.works.leave(work, self.now, is_served=False):
                    self.works.remove(work)
        for work in self.works.expired(self.now + PATIENCE):
            self.works.remove(work)
        assert not len(self.works)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("door", "late", "accepted", "behind"),
    [
        (Door(5), [0, 4], [5, 6], [7]),
        (Door(5, closed=5), [4, 5], [6], [7]),
        (Door(5, max_staleness=1), [3], [4, 5, 6, 7], [8]),
        (Door(5, closed=4, max_staleness=0), [4], [5, 6], [7]),
        (Door(5, closed=5, max_staleness=1), [4], [5, 6, 7], [8]),
    ],
)
def test_door(door: Door, late: list[int], accepted: list[int], behind: list[int]) -> None:
    for code, steps in ((Acceptance.LATE, late), (Acceptance.ACCEPTED, accepted), (Acceptance.BEHIND, behind)):
        assert {door.verdict(step) for step in steps} == {code}


def test_full_peer_is_busy_until_there_is_room() -> None:
    works = Works(100, PATIENCE)
    works.most_waiting = 2
    (_, first), (_, second) = (works.ask(each, 1, True, DOOR) for each in IDENTITIES[:2])
    assert first is not None
    assert second is not None
    assert works.ask(IDENTITIES[2], 1, True, DOOR) == (Acceptance.BUSY, None)
    assert works.receive(first, 90)
    works.advance(first, Phase.DONE, 90)
    assert works.ask(IDENTITIES[2], 1, True, DOOR) == (Acceptance.BUSY, None), "no memory for another one as large"
    works.advance(first, Phase.DONE, 0)
    works.advance(second, Phase.FAILED, 0)
    assert works.ask(IDENTITIES[2], 1, True, DOOR)[0] is Acceptance.ACCEPTED


def test_what_has_counted_does_not_count_again() -> None:
    works = Works(100, PATIENCE)
    _, work = works.ask(IDENTITIES[0], 1, True, DOOR)
    assert work is not None
    works.receive(work, 1)
    works.advance(work, Phase.BACKWARD)
    assert works.leave(work, 0.0, is_served=True)
    works.remove(work)
    assert works.ask(IDENTITIES[0], 1, True, DOOR) == (Acceptance.GONE, None)
