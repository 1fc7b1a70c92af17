"""The name by which a peer is told to people: in log lines, in the monitor. A claim that anybody can make."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from msgspec import Meta

from shoal.base.logs import MAX_NAME_CHARACTERS, shown_name

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
"""As it travels. It must be made readable before it is shown, see :func:`~shoal.base.logs.shown_name`."""


def default_name() -> str:
    """The value of ``SHOAL_NAME`` if that is set, even if it is empty; otherwise the host and the process."""
    chosen = os.environ.get("SHOAL_NAME", os.environ.get("HIVEMIND_NAME"))
    if chosen is not None:
        return checked_name(chosen, "SHOAL_NAME")
    host, process = socket.gethostname().partition(".")[0], f"-{os.getpid()}"
    return shown_name(f"{shown_name(host)[: MAX_NAME_CHARACTERS - len(process)]}{process}")


def checked_name(name: object, option: str = "name") -> str:
    """Check a name that the user has given.

    Raises:
        TypeError: it is no text.
        ValueError: it is too long, or holds signs that cannot be printed.
    """
    if not isinstance(name, str):
        raise TypeError(f"{option} must be a text such as 'laptop', or '' for no name, got {name!r}")
    if name != shown_name(name):
        raise ValueError(
            f"{option} must have at most {MAX_NAME_CHARACTERS} printable characters, with single spaces at most, got "
            f"{name[: 2 * MAX_NAME_CHARACTERS]!r}"
        )
    return name
