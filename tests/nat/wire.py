"""The internet of a laboratory: a process that carries packets from one line to another, each after a delay.

    laboratory ──socket: lines, commands──► wire ──tun──► routers and public hosts

A line is a tun device, at which the wire has the networks of one customer. A packet goes to the line whose network its
destination is in; one whose source is not of its own line is dropped, as providers do. The kernel hands over up to
64 kB at once and cuts them into segments itself, so slow code is fast enough. The end of the socket means that the
laboratory is gone, however that came about: then the wire removes all that is left of it, and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.computers import inside, remove_of

SET_INTERFACE, SET_OFFLOAD = 0x400454CA, 0x400454D0
IS_TUN, WITHOUT_PACKET_INFORMATION, WITH_OFFLOAD_HEADER = 0x0001, 0x1000, 0x4000
CHECKSUMS, SEGMENTS_4, SEGMENTS_6 = 1, 2, 4
OFFLOAD_HEADER = 10
"""Bytes before each packet: how large its segments are and which checksum is still to be made."""
LARGEST = OFFLOAD_HEADER + 65536
BURST_PACKETS = 64
QUEUE_BYTES = 8_000_000
"""What a line has under way to it; packets beyond that are lost, as on any network."""
QUEUE_SECONDS = 0.1
"""What a line with a rate holds back before it drops."""
UDP = 17
_ROOT = Path(__file__).parents[2]


class Wire:
    """The process, seen from the laboratory.

    Args:
        laboratory: what the names of its namespaces begin with.
        homes: a folder that goes with it.
    """

    def __init__(self, laboratory: str, homes: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nat.wire", str(theirs.fileno()), laboratory, str(homes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                start_new_session=True,  # Ctrl-C, and what kills the tests, leave it alone: it tidies up after them
            )

    def add(self, namespace: str, device: str, networks: list[bytes], delay: float, megabits: float | None) -> int:
        """Make a device in that namespace the end of a new line; returns the line's number.

        Args:
            namespace: where the device is made.
            device: its name.
            networks: what addresses at its end begin with.
            delay: seconds that a packet takes from this line to the middle of the internet, or back.
            megabits: that it carries per second from here; None: as many as come.
        """
        with inside(namespace):
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            with inside(namespace):
                flags = IS_TUN | WITHOUT_PACKET_INFORMATION | WITH_OFFLOAD_HEADER
                fcntl.ioctl(tun, SET_INTERFACE, struct.pack("16sH", device.encode(), flags))
                fcntl.ioctl(tun, SET_OFFLOAD, CHECKSUMS | SEGMENTS_4 | SEGMENTS_6)
            return self._ask([tun], add=[each.hex() for each in networks], delay=delay, megabits=megabits)
        finally:
            os.close(tun)

    def cut(self, line: int) -> None:
        """From now on nothing arrives there and nothing leaves, and nobody is told."""
        self._ask(cut=line)

    def mend(self, line: int) -> None:
        """Undo :meth:`cut`."""
        self._ask(mend=line)

    def set_delay(self, line: int, seconds: float) -> None:
        """Packets that are under way keep the old one."""
        self._ask(slow=line, delay=seconds)

    def block_udp(self) -> None:
        """From now on only TCP and the messages of IP itself get through, everywhere."""
        self._ask(block=UDP)

    def carried(self, sender: int, receiver: int) -> int:
        """Bytes carried so far from one line to another, headers included."""
        return self._ask(carried=[sender, receiver])

    def _ask(self, descriptors: list[int] | None = None, **command: Any) -> int:
        socket.send_fds(self._socket, [json.dumps(command).encode()], descriptors or [])
        answer = self._socket.recv(64)
        assert answer, "the wire has died"
        return json.loads(answer)

    def close(self) -> None:
        """End the process; it removes what is left of the laboratory."""
        self._socket.close()
        self._process.wait()


# --- in the process ---------------------------------------------------------------------------------------------------


class Line:
    """One end of the wire."""

    def __init__(self, number: int, tun: int, delay: float, megabits: float | None) -> None:
        self.number, self.tun, self.delay = number, tun, delay
        self._seconds_per_byte = 0.0 if megabits is None else 8e-6 / megabits
        self.is_cut = False
        self.waiting_bytes = 0
        self._busy_until = 0.0

    def send(self, nbytes: int) -> float | None:
        """When a packet that comes now will have left; ``None``: too many wait before it, and it is lost."""
        now = time.monotonic()
        begins = max(now, self._busy_until)
        if begins > now + QUEUE_SECONDS:
            return None
        self._busy_until = begins + nbytes * self._seconds_per_byte
        return self._busy_until


class Middle:
    """All lines, and the packets between them."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = select.epoll()
        self._poll.register(control, select.EPOLLIN)
        self._lines: list[Line] = []
        self._of_tun: dict[int, Line] = {}
        self._of_network: dict[bytes, Line] = {}
        self._waiting: list[tuple[float, int, Line, Line, bytes]] = []
        self._number = 0
        self._blocked: set[int] = set()
        self._carried: Counter[tuple[int, int]] = Counter()

    def carry(self) -> None:
        """Returns when the laboratory is gone."""
        while True:
            pause = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for descriptor, _ in self._poll.poll(pause):
                if descriptor == self._control.fileno():
                    if not self._obey():
                        return
                else:
                    self._read(self._of_tun[descriptor])
            self._deliver()

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not data:
            return False
        answer = 0
        match json.loads(data):
            case {"add": networks, "delay": delay, "megabits": megabits}:
                line = Line(len(self._lines), descriptors[0], delay, megabits)
                answer = line.number
                self._lines.append(line)
                self._of_tun[line.tun] = line
                self._of_network |= {bytes.fromhex(each): line for each in networks}
                self._poll.register(line.tun, select.EPOLLIN)
            case {"cut": number}:
                self._lines[number].is_cut = True
            case {"mend": number}:
                self._lines[number].is_cut = False
            case {"slow": number, "delay": delay}:
                self._lines[number].delay = delay
            case {"block": protocol}:
                self._blocked.add(protocol)
            case {"carried": [sender, receiver]}:
                answer = self._carried[sender, receiver]
        self._control.send(json.dumps(answer).encode())
        return True

    def _read(self, line: Line) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(BURST_PACKETS):
                self._take(line, os.read(line.tun, LARGEST))

    def _take(self, line: Line, data: bytes) -> None:
        packet = memoryview(data)[OFFLOAD_HEADER:]
        if packet[0] >> 4 == 4:
            protocol, source, destination = packet[9], bytes(packet[12:15]), bytes(packet[16:19])
        else:
            protocol, source, destination = packet[6], bytes(packet[8:12]), bytes(packet[24:28])
        target = self._of_network.get(destination)
        if target is None or self._of_network.get(source) is not line or protocol in self._blocked:
            return
        if line.is_cut or target.is_cut or target.waiting_bytes > QUEUE_BYTES:
            return
        if (sent_at := line.send(len(packet))) is None:
            return
        self._number += 1
        target.waiting_bytes += len(data)
        due = sent_at + line.delay + target.delay
        heapq.heappush(self._waiting, (due, self._number, line, target, data))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            *_, line, target, data = heapq.heappop(self._waiting)
            target.waiting_bytes -= len(data)
            if target.is_cut:
                continue
            self._carried[line.number, target.number] += len(data) - OFFLOAD_HEADER
            with contextlib.suppress(OSError):  # its queue is full, or its device is down: the packet is lost
                os.write(target.tun, data)


def main() -> None:
    _, descriptor, laboratory, homes = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Middle(socket.socket(fileno=int(descriptor))).carry()
    remove_of(laboratory)
    shutil.rmtree(homes, ignore_errors=True)


if __name__ == "__main__":
    main()
