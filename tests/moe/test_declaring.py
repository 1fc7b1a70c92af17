"""How experts are named, declared in the DHT, and found there."""

from __future__ import annotations

import pytest

from shoal.moe.declare import declare_experts, withdraw_experts
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
        withdrawn = withdraw_experts(first, ["e.1.2", "e.1.3", "f.1"], until)
        assert withdrawn == dict.fromkeys(["e.1.2", ("e.1.", 2), "f.1", ("f.1.", -1)], True)
        assert second.get("e.1.2", latest=True).value is None  # type: ignore[union-attr]
        assert second.get("e.1.3", latest=True).value == second.peer_id.to_base58()  # type: ignore[union-attr]
        assert declare_experts(first, ["f.1"], until + 1)["f.1"], "a server that starts again"
