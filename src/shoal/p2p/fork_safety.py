"""Sockets belong to the process that opened them: a forked child gives its copies up at once.

A forked child (a worker of a data loader, for example) gets a duplicate of every socket. As long as it lives, closing
one in the parent would not reach the other side, the parent's death would go unnoticed, and its port would stay taken.
"""

from __future__ import annotations

import os

_owners: dict[int, object] = {}
"""Open sockets by file descriptor. The system gives a descriptor to the next socket before the loop has told the owner
of the last one that it is closed."""


def own_socket(descriptor: int, owner: object) -> None:
    """Remember an open socket, by its file descriptor."""
    _owners[descriptor] = owner


def disown_socket(descriptor: int, owner: object) -> None:
    """Forget a socket that is closed or about to be."""
    if _owners.get(descriptor) is owner:
        del _owners[descriptor]


def _give_up_sockets_of_parent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in _owners:
        os.dup2(nowhere, descriptor)  # not os.close: a leftover of its former owner may close it again
    os.close(nowhere)
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_sockets_of_parent)
