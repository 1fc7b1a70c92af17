"""Addresses of the own peer as people want to see them, and how many sockets it may have."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from textwrap import dedent

import pytest

from shoal.base.logs import use_hivemind_log_handler
from shoal.net.own_addresses import LOCALHOST, choose_ip_address, log_visible_maddrs
from shoal.p2p import Multiaddr

PEER = "12D3KooWPTeYwtPq2qTVSYvDs9NyKGB4bgqEwzLLKwDtNPsYM2Jn"
LOOPBACK, PRIVATE, PUBLIC = "/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.2/tcp/1", "/ip4/203.0.112.7/tcp/1"
PUBLIC_6, NAME = "/ip6/2a00:1450::1/tcp/1", "/dns4/example.org/tcp/1"


@pytest.mark.parametrize(
    ("maddrs", "options", "chosen"),
    [
        ([LOOPBACK], {}, LOCALHOST),
        ([LOOPBACK, PUBLIC], {}, "203.0.112.7"),
        ([LOOPBACK, PRIVATE, PUBLIC_6], {}, "2a00:1450::1"),
        ([PUBLIC_6, PUBLIC], {}, "203.0.112.7"),
        ([PUBLIC_6, PUBLIC], {"protocol_priority": ("ip6", "ip4")}, "2a00:1450::1"),
        ([PRIVATE, PUBLIC], {"prefer_global": False}, "192.168.1.2"),
        ([PUBLIC_6, PRIVATE], {"prefer_global": False}, "192.168.1.2"),
        ([PUBLIC_6, PRIVATE], {"protocol_priority": ("ip4",)}, "192.168.1.2"),
        ([NAME, PRIVATE], {}, "192.168.1.2"),
    ],
)
def test_the_address_that_others_most_likely_reach(maddrs: list[str], options: dict, chosen: str) -> None:
    addresses = [Multiaddr(maddr) for maddr in maddrs]
    assert choose_ip_address(addresses, **options) == chosen
    assert choose_ip_address(iter(addresses), **options) == chosen


def test_no_address() -> None:
    for maddrs in ([], [Multiaddr(NAME)]):
        with pytest.raises(ValueError, match="no address with ip4 or ip6"):
            choose_ip_address(maddrs)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    use_hivemind_log_handler("nowhere")  # to pytest's own handler
    with caplog.at_level(logging.INFO, logger="shoal"):
        yield caplog


def test_users_are_told_how_others_connect(lines: pytest.LogCaptureFixture) -> None:
    maddrs = [Multiaddr(f"{maddr}/p2p/{PEER}") for maddr in (LOOPBACK, PUBLIC)]
    log_visible_maddrs(maddrs, only_p2p=False)
    assert lines.messages == [
        f"To connect other peers to this one, use --initial_peers {maddrs[1]}",
        f"Full list of visible multiaddresses: {maddrs[0]} {maddrs[1]}",
    ]


def test_users_are_told_names_and_ids(lines: pytest.LogCaptureFixture) -> None:
    maddr = Multiaddr(f"{NAME}/p2p/{PEER}")
    log_visible_maddrs([maddr])
    log_visible_maddrs([maddr, Multiaddr(f"{LOOPBACK}/p2p/{PEER}")], only_p2p=True)
    assert lines.messages[0].endswith(f"--initial_peers {maddr}")
    assert lines.messages[2].endswith(f"--initial_peers /p2p/{PEER}")


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [(64, 256, (200, 200), 200), (64, 256, (10_000, 10_000), 256), (64, 256, (32, 32), 64), (64, 64, (100, 100), 64)],
)
def test_more_files_up_to_what_is_allowed(soft: int, hard: int, wanted: tuple[int, int], expected: int) -> None:
    """In a process of its own, which is not allowed to raise the hard limit."""
    script = f"""
        import logging, resource
        logging.basicConfig(level=logging.INFO)
        from shoal.net import limits

        real = resource.setrlimit

        def as_an_ordinary_user(kind, limits):
            if limits[1] > {hard}:
                raise ValueError("not allowed to raise maximum limit")
            real(kind, limits)

        real(resource.RLIMIT_NOFILE, ({soft}, {hard}))
        resource.setrlimit = as_an_ordinary_user
        limits.increase_file_limit{wanted}
        found = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert found == ({expected}, {hard}), found
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (f"at most {expected} files" in done.stderr) == (expected < wanted[0])


def test_where_there_is_no_such_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.net.limits import increase_file_limit

    monkeypatch.setitem(sys.modules, "resource", None)  # importing it raises ImportError, as on Windows
    increase_file_limit()
