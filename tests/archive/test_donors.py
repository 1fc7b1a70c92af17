"""A peer that only gives the state: everybody begins at its epoch, and nobody waits for it."""

from __future__ import annotations

import msgspec
import pytest

from shoal.averaging.state.donor import UploadSlots
from shoal.optim.diloco.slots import StepRule
from shoal.optim.progress.board import EpochRule, ProgressBoard
from shoal.optim.progress.exchange import ProgressMessage
from shoal.optim.progress.records import LocalTrainingProgress, PerformanceEMA, RefreshPolicy, parse_record
from shoal.p2p import Identity, PeerID

NOW, EPOCH = 1000.0, 7


def make_board(rule: EpochRule | None = None) -> ProgressBoard:
    return ProgressBoard(b"self", False, 100, RefreshPolicy(), PerformanceEMA(), NOW, rule=rule)


def record(name: bytes, epoch: int, *, is_donor: bool = False) -> LocalTrainingProgress:
    return LocalTrainingProgress(name, epoch, 0, 0.0, NOW, False, is_donor)


@pytest.mark.parametrize("rule", [EpochRule(), StepRule(5.0)], ids=["samples", "steps"])
def test_donor_shows_its_epoch_and_is_not_awaited(rule: EpochRule) -> None:
    board = make_board(rule)
    board.hear(record(b"donor", EPOCH, is_donor=True), NOW + 60, NOW)
    progress = board.global_progress(NOW)
    assert (progress.epoch, progress.num_peers) == (EPOCH, 0)
    assert board.believed_epochs(NOW) == {b"donor": EPOCH}
    board.finish_update(EPOCH, [], NOW)  # this peer has downloaded the state
    assert board.expected_members(NOW, EPOCH + 9) == set()
    assert board.still_expected(NOW, {b"donor": EPOCH}) == set()
    board.hear(record(b"other", EPOCH), NOW + 60, NOW)
    assert board.expected_members(NOW, EPOCH + 9) == {b"other"}
    assert board.still_expected(NOW, {b"donor": EPOCH, b"other": EPOCH}) == {b"other"}
    assert board.global_progress(NOW).num_peers == 1
    assert board.present(NOW) == [b"other"]


def test_step_beside_a_donor_logs_no_missing_peers() -> None:
    board = make_board()
    board.hear(record(b"donor", 0, is_donor=True), NOW + 60, NOW)
    board.note_round({}, NOW)
    assert board.guard.troubles["alone"] == 0
    board.hear(record(b"other", 0), NOW + 60, NOW)
    for now in (NOW, NOW + 10, NOW + 20):  # it is waited for three times
        board.begin_update(now, 5.0)
        board.note_round({}, now + 5)
    assert board.guard.troubles["alone"] == 1


def test_who_donates_says_so_in_records_and_calls() -> None:
    board = make_board()
    board.donate(EPOCH, NOW)
    assert board.wants_publishing(NOW)
    told = ProgressMessage.of(board.own)
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=ProgressMessage)
    peer = Identity.generate().peer_id
    assert heard.progress_of(peer).is_donor
    values = msgspec.structs.replace(board.own, peer_id=peer.to_bytes()).to_dict()
    assert parse_record(values).is_donor
    assert "is_donor" not in record(peer.to_bytes(), EPOCH).to_dict()
    assert not parse_record(record(peer.to_bytes(), EPOCH).to_dict()).is_donor


async def test_nobody_waits_for_an_archiver() -> None:
    async def no_snapshot() -> None:
        return None

    places = UploadSlots(no_snapshot)
    keeps, trains = (PeerID(name) for name in (b"keeps", b"trains"))
    for peer, flag in ((keeps, False), (trains, True)):
        place = places.find(peer, 0.0, trains=flag)
        assert place is not None
        place.begin(0, 0.0)
    assert places.on_their_way(0.0) == {trains}
    for place in list(places):
        places.leave(place, 1.0)
    assert places.on_their_way(1.0) == {trains}, "it is about to tell others that it takes part"
