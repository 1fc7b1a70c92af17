"""What a peer knows of other peers."""

from __future__ import annotations

from shoal.peers.book import PeerBook, PeerRecord
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
