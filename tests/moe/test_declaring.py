"""How experts are named, declared in the DHT, and found there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from shoal.moe.declare import declare_experts, get_experts, withdraw
from shoal.moe.uids import is_valid_prefix, is_valid_uid, split_uid
from tests.moe.swarms import soon, swarm

VALID = ["ffn.0", "00.1.2", "block2.1.23", "e:x 7.10.0.3", "🐟.1", "1.2"]
INVALID = [
    *["", ".", "ffn", "ffn.", ".0", "expert.-1", "expert.01", "e..1", "e.1.", "e.1.x", "e.1.x.2", "e.x", "e.1.2 "],
    *["e.1\n", "e.1.\n", " .", "e.1e", "e.¹", "e.1,2"],
]


def test_uids_and_prefixes_follow_their_rules() -> None:
    for uid in VALID:
        assert is_valid_uid(uid)
        assert not is_valid_prefix(uid)
        assert is_valid_prefix(f"{uid}.")
        assert not is_valid_uid(f"{uid}.")
    assert [text for text in INVALID if is_valid_uid(text)] == []
    assert {text for text in INVALID if is_valid_prefix(text)} == {"ffn.", "e.1.", " ."}
    assert split_uid("ffn.0.12") == split_uid("ffn.0.12.") == ("ffn.0.", 12)
    assert split_uid("ffn.-1") == ("ffn.", -1)
    with pytest.raises(ValueError, match="does not end with a number"):
        split_uid("ffn.")


def test_each_expert_has_the_records_of_its_prefixes() -> None:
    with swarm(1) as [dht]:
        assert declare_experts(dht, ["f.7", "f.8"], soon()) == dict.fromkeys(
            ["f.7", ("f.7.", -1), "f.8", ("f.8.", -1)], True
        )
        stored = declare_experts(dht, ["e.1.2.3", "e.1.2.5", "e.2.0"], soon(), wait=False).result()
        assert stored == dict.fromkeys(
            ["e.1.2.3", ("e.1.2.", 3), ("e.1.", 2), "e.1.2.5", ("e.1.2.", 5), "e.2.0", ("e.2.", 0)], True
        )
        peer = dht.peer_id.to_base58()
        assert dht.get("e.1.2.3").value == peer  # type: ignore[union-attr]
        assert {k: v.value for k, v in dht.get("e.1.2.").value.items()} == {  # type: ignore[union-attr]
            3: ("e.1.2.3", peer),
            5: ("e.1.2.5", peer),
        }
        assert dht.get("e.") is None
        for wrong in ("e.1", ["e.1", "e."]):
            with pytest.raises(AssertionError, match=r"uids must be a list|not a valid uid"):
                declare_experts(dht, wrong, soon())


def test_only_own_records_are_withdrawn() -> None:
    with swarm(2) as [first, second]:
        until = soon()
        declare_experts(first, ["e.1.2", "e.1.3", "f.1"], until)
        declare_experts(second, ["e.1.3"], until + 1)
        withdrawn = first.run_coroutine(partial(withdraw, uids=["e.1.2", "e.1.3", "f.1"], until=until))
        assert withdrawn == dict.fromkeys(["e.1.2", ("e.1.", 2), "f.1", ("f.1.", -1)], True)
        assert second.get("e.1.2", latest=True).value is None  # type: ignore[union-attr]
        assert second.get("e.1.3", latest=True).value == second.peer_id.to_base58()  # type: ignore[union-attr]
        assert declare_experts(first, ["f.1"], until + 1)["f.1"], "a server that starts again"


def test_experts_are_found_by_uid_also_after_peers_left() -> None:
    with swarm(8) as dhts:
        uids = [f"ffn.{n}.{n // 2}" for n in range(20)]
        for n, dht in enumerate(dhts[2:4]):
            declare_experts(dht, uids[n * 10 : n * 10 + 10], soon())
        dhts[0].store("bad.0", "no peer", soon())
        dhts[0].store("bad.1", 7, soon())
        dhts[0].shutdown()
        dhts[1].shutdown()
        asked = [uids[3], "ffn.99", uids[17], "bad.0", "bad.1", "ffn.3.", uids[3]]
        found = get_experts(dhts[7], asked)
        expected = [(uids[3], dhts[2]), None, (uids[17], dhts[3]), None, None, None, (uids[3], dhts[2])]
        assert [each and (each.uid, each.peer_id) for each in found] == [
            each and (each[0], each[1].peer_id) for each in expected
        ]
        with ThreadPoolExecutor(1) as threads:  # a thread without an event loop
            future = threads.submit(get_experts, dhts[7], [uids[3]], soon(1000), return_future=True).result()
        assert future.result() == [None], "none is declared for so long"
        with pytest.raises(AssertionError, match="got a text"):
            get_experts(dhts[7], uids[0])
