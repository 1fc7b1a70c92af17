"""Hosts with slow and long links between them, on this machine: network namespaces joined by a wire in user space.

Every host is a network namespace with one tun device. What it sends is limited to a rate by the kernel's token bucket,
so that TCP meets a real queue, and a thread of this process carries each packet to the other host's device after the
delay. Needs Linux, root, /dev/net/tun and iproute2.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from types import TracebackType

TUN_SET_INTERFACE, INTERFACE_IS_TUN, WITHOUT_PACKET_INFORMATION = 0x400454CA, 0x0001, 0x1000
MTU = 9000
"""Large packets, so that the wire, which is slow code, carries few of them."""
QUEUE_MILLISECONDS = 100
BURST_PACKETS = 64


class Host:
    """One namespace with an address."""

    def __init__(self, name: str, address: str, megabits: float) -> None:
        self.name, self.address = name, address
        _ip(f"netns add {name}")
        self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = INTERFACE_IS_TUN | WITHOUT_PACKET_INFORMATION
        fcntl.ioctl(self.tun, TUN_SET_INTERFACE, struct.pack("16sH", name.encode(), flags))
        _ip(f"link set {name} netns {name}")
        _ip(f"-n {name} addr add {address}/24 dev {name}")
        _ip(f"-n {name} link set {name} mtu {MTU} txqueuelen 1000 up")
        _ip(f"-n {name} link set lo up")
        bucket = f"tbf rate {megabits}mbit burst 128kb latency {QUEUE_MILLISECONDS}ms"
        _run(f"tc -n {name} qdisc replace dev {name} root {bucket}")

    @property
    def launcher(self) -> list[str]:
        """What to put before a command so that it runs on this host."""
        return ["ip", "netns", "exec", self.name]

    def close(self) -> None:
        os.close(self.tun)
        _ip(f"netns del {self.name}")


class WideArea:
    """Some hosts and the wire between them; leaving the block takes them down.

    Args:
        megabits: how many megabits each host can send per second; it can receive as fast as the others send.
        round_trip: seconds from one host to another and back.
    """

    def __init__(self, hosts: int, megabits: float, round_trip: float) -> None:
        self._count, self._megabits, self._delay = hosts, megabits, round_trip / 2
        self.hosts: list[Host] = []
        self._stopped = threading.Event()
        self._wire = threading.Thread(target=self._carry, name="wire", daemon=True)

    def __enter__(self) -> WideArea:
        try:
            for index in range(self._count):
                name = f"shoal{os.getpid() % 100_000}h{index}"
                self.hosts.append(Host(name, f"10.77.0.{index + 1}", self._megabits))
        except BaseException:
            self._close_hosts()
            raise
        self._wire.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._wire.join()
        self._close_hosts()

    def _close_hosts(self) -> None:
        for host in self.hosts:
            host.close()

    def _carry(self) -> None:
        targets = {bytes(map(int, host.address.split("."))): host.tun for host in self.hosts}
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        poll = select.epoll()
        for tun in targets.values():
            poll.register(tun, select.EPOLLIN)
        with poll:
            while not self._stopped.is_set():
                pause = waiting[0][0] - time.monotonic() if waiting else 0.05
                for tun, _ in poll.poll(max(0.0, min(pause, 0.05))):
                    for packet in _read_packets(tun):
                        target = targets.get(packet[16:20])
                        if target is not None:
                            number += 1
                            heapq.heappush(waiting, (time.monotonic() + self._delay, number, target, packet))
                now = time.monotonic()
                while waiting and waiting[0][0] <= now:
                    *_, target, packet = heapq.heappop(waiting)
                    with contextlib.suppress(OSError):  # its queue is full: the packet is lost, as on any network
                        os.write(target, packet)


def _read_packets(tun: int) -> list[bytes]:
    packets = []
    with contextlib.suppress(BlockingIOError):
        while len(packets) < BURST_PACKETS:
            packets.append(os.read(tun, 65536))
    return packets


def _ip(arguments: str) -> None:
    _run(f"ip {arguments}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
