"""miniupnpd, which opens ports of a router to hosts that ask for it: by PCP, NAT-PMP or UPnP.

Behind another router it refuses, because it sees that its outer address is none: with NAT-PMP by result 3. Older ones
do not look, so this one may be told that it has a proper address.
"""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path

from tests.nat.rules import LAN, WAN

TABLE = """
table inet miniupnpd {
    chain forward {
        type filter hook forward priority filter;
        jump miniupnpd
    }
    chain miniupnpd {
    }
    chain prerouting {
        type nat hook prerouting priority dstnat;
        jump prerouting_miniupnpd
    }
    chain postrouting {
        type nat hook postrouting priority srcnat;
        jump postrouting_miniupnpd
    }
    chain prerouting_miniupnpd {
    }
    chain postrouting_miniupnpd {
    }
}
"""
"""The chains in which it writes its rules."""


def write_settings(folder: Path, lan: str, *, outer: str, upnp: bool, datagrams: bool = True) -> Path:
    """Its configuration; returns the file.

    Args:
        folder: for the files.
        lan: the network inside, as ``192.168.1.0/24``.
        outer: the address that it believes to have outside; empty: it looks.
        upnp: answer UPnP, too.
        datagrams: answer PCP and NAT-PMP.
    """
    lines = [
        f"ext_ifname={WAN}",
        f"listening_ip={LAN}",
        "port=0",
        f"enable_natpmp={'yes' if datagrams else 'no'}",
        f"enable_upnp={'yes' if upnp else 'no'}",
        "ext_perform_stun=no",
        "secure_mode=yes",
        "system_uptime=yes",
        "notify_interval=60",
        f"uuid={uuid.uuid4()}",
        "upnp_table_name=miniupnpd",
        "upnp_nat_table_name=miniupnpd",
        *([f"ext_ip={outer}"] if outer else []),
        f"allow 1024-65535 {lan} 1024-65535",
        "deny 0-65535 0.0.0.0/0 0-65535",
    ]
    file = folder / "miniupnpd.conf"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def start(namespace: str, settings: Path) -> subprocess.Popen[bytes]:
    """Run it on a router, in the foreground; its log is beside its settings."""
    command = ["miniupnpd", "-d", "-f", str(settings), "-P", str(settings.with_suffix(".pid"))]
    with settings.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
