"""What a peer knows of other peers."""

from __future__ import annotations

from shoal.peers.book import FAILURES_TO_LOSE_SHARE, MAX_REST_SECONDS, PeerBook, PeerRecord, Trial
from shoal.peers.identity import PeerID

PEERS = [PeerID.from_public_key(bytes([number] * 32)) for number in range(4)]


def test_reading_keeps_no_record() -> None:
    book = PeerBook()
    assert book.find(PEERS[0]) == PeerRecord()
    assert not len(book)


def test_a_record_is_written_once_and_found_again() -> None:
    book = PeerBook()
    book[PEERS[0]].round_trip = 0.5
    book[PEERS[0]].reach = 1
    assert book.find(PEERS[0]) == PeerRecord(round_trip=0.5, reach=1)


def test_the_peers_that_were_written_about_last_are_kept() -> None:
    book = PeerBook(most=3)
    for peer in PEERS[:3]:
        book[peer].is_near = True
    book[PEERS[0]].reach = 2
    book[PEERS[3]].is_near = True
    assert [book.find(peer).is_near for peer in PEERS] == [True, False, True, True]
    assert [record.reach for record in book.values()] == [None, 2, None]


def test_strangers_never_push_out_a_member_of_rounds() -> None:
    forgotten: list[PeerID] = []
    book = PeerBook(most=2, on_forget=forgotten.append)
    book[PEERS[0]].reach = 1
    book.see_member(PEERS[0]).history.delivered = 1.0
    assert book.find(PEERS[0]).reach == 1, "it keeps what was known of it"
    for peer in PEERS[1:]:
        book[peer].reach = 2
    assert book[PEERS[0]] is book.find(PEERS[0])
    assert [peer for peer, _ in book.members()] == [PEERS[0]]
    assert len(book) == 3
    for peer in PEERS[1:3]:
        book.see_member(peer)
    assert forgotten == [PEERS[0]]
    assert book.find(PEERS[0]) == PeerRecord()


def test_a_trial_rests_longer_with_each_failure() -> None:
    trial, pauses = Trial(), []
    for _ in range(FAILURES_TO_LOSE_SHARE + 2):
        trial.note_failure(0.0, seconds=1.0)
        pauses.append(trial.rests_until)
    assert pauses == [20, 20, 20, 40, 80]
    assert trial.rests(79.9)
    assert not trial.rests(80.0)
    trial.note_success()
    assert not trial.is_lost
    trial.note_failure(0.0, seconds=1.0, least=FAILURES_TO_LOSE_SHARE)
    assert trial.is_lost
    trial.note_failure(0.0, seconds=1e9)
    assert trial.rests_until == MAX_REST_SECONDS
