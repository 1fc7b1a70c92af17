"""One peer that sends what an all-reduce has to send, as zeros over bare TCP: what the links themselves take.

No encryption, no arithmetic, and nothing depends on what others send; see :mod:`wan`.
"""

from __future__ import annotations

import socket
import threading
import time

from commands import obey, peer_parser

CONNECTIONS = 4
"""To each of the others, both ways."""
PIECE_BYTES = 2**20


class BareTcpPeer:
    """Sends the same number of bytes to each of the others, all at once."""

    version = "sockets"

    def __init__(self, index: int, peers: int, megabytes: float, host: str) -> None:
        self.index, self.peers = index, peers
        self.bytes_per_connection = round(2 * megabytes * 1e6 / peers / CONNECTIONS)
        self.listener = socket.create_server((host, 0), backlog=CONNECTIONS * peers)

    def open(self) -> tuple[str, int]:
        """Where the others can connect to."""
        host, port = self.listener.getsockname()
        return host, port

    def join(self, addresses: list[tuple[str, int]]) -> None:
        """Connect to all others, and wait until they have."""
        others = [tuple(address) for index, address in enumerate(addresses) if index != self.index]
        self.outgoing = [socket.create_connection(other) for other in others for _ in range(CONNECTIONS)]
        self.incoming = [self.listener.accept()[0] for _ in self.outgoing]

    def reduce(self) -> dict[str, float]:
        """Send and receive everything; returns when it began and ended."""
        work = [threading.Thread(target=self._send, args=(each,)) for each in self.outgoing]
        work += [threading.Thread(target=self._receive, args=(each,)) for each in self.incoming]
        began = time.monotonic()
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        return {"began": began, "ended": time.monotonic()}

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(bytes(self.bytes_per_connection))

    def _receive(self, connection: socket.socket) -> None:
        left, buffer = self.bytes_per_connection, memoryview(bytearray(PIECE_BYTES))
        while left:
            taken = connection.recv_into(buffer, min(left, PIECE_BYTES))
            if not taken:
                raise ConnectionError("the other side closed the connection")
            left -= taken

    def close(self) -> None:
        for connection in (self.listener, *self.outgoing, *self.incoming):
            connection.close()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--listen", required=True)
    args = parser.parse_args()
    obey(lambda: BareTcpPeer(args.index, args.peers, args.megabytes, args.listen))


if __name__ == "__main__":
    main()
