"""The peer's side of a :class:`crew.Crew`: it obeys the commands it reads, one JSON line each, and answers likewise."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Protocol


class Peer(Protocol):
    """Whatever takes part in a benchmark. Its other methods are the commands."""

    index: int
    version: str
    """Of the library under test."""


def peer_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of what every peer is told at its start; each kind of peer adds its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    return parser


def obey(make_peer: Callable[[], Peer]) -> None:
    """Make a peer, answer with its version, and call its method of each command's name.

    Ends when told to close, or when the coordinator is gone.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers

    def answer(message: dict[str, object]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    peer = make_peer()
    answer({"result": peer.version})
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer({"result": getattr(peer, command)(*arguments)})
        except Exception as e:
            answer({"error": f"peer {peer.index}, {command}: {type(e).__name__}: {e}"})
        if command == "close":
            return
