"""The demo as a page: an observer of the run in the runner's process, as ``shoal monitor --web`` would be."""

from __future__ import annotations

from contextlib import ExitStack, closing

from shoal.cli.monitor import start_page
from shoal.dht import DHT

RUN_ID = "shoal_demo"


def show_page(addresses: list[str], port: int, stack: ExitStack) -> str:
    """Watch the demo and show it as a page, until the stack is closed.

    Args:
        addresses: of a peer.
        port: of the page; 0 = any free one.

    Returns:
        The address of the page.

    Raises:
        ModuleNotFoundError: packages are missing.
        OSError: the port is taken.
    """
    from shoal.monitor.observer import Monitor

    dht = stack.enter_context(DHT(addresses, start=True, client_mode=True, token=""))
    monitor = stack.enter_context(Monitor(dht, RUN_ID))
    page = stack.enter_context(closing(start_page(monitor.view, port)))
    url: str = page.url
    return url
