"""A server of experts in its own process.

The parent sends the arguments to the child's standard input and keeps it open; when it closes, the server shuts down.
The child answers with one line of JSON: its peer, or the error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from shoal.moe import layers
from shoal.moe.expert_server import Server
from shoal.peers.identity import PeerID, PeerInfo
from shoal.peers.multiaddr import Multiaddr


@contextlib.contextmanager
def background_server(*args: Any, shutdown_timeout: float = 5, **kwargs: Any) -> Iterator[PeerInfo]:
    """A server in another process, for as long as the ``with`` block lasts.

    Args:
        args, kwargs: for :meth:`Server.create <shoal.moe.expert_server.Server.create>`. They are pickled.
        shutdown_timeout: seconds to shut down; then the process is killed.

    Yields:
        Its peer, with addresses for ``initial_peers``.

    Raises:
        RuntimeError: the server could not start; the text has the error of the child.
        ValueError: the class of the experts is not known there.
    """
    module = None if kwargs.get("custom_module_path") else _module_of(kwargs.get("expert_cls", "ffn"))
    message = pickle.dumps((module, args, kwargs))
    path = os.pathsep.join(map(os.path.abspath, sys.path))  # '' is the working directory
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; its answer says why, or that there is none
            process.stdin.write(message)
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server's process ended with status {process.wait()} before it was ready")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the server could not start: {answer['error']}")
        yield PeerInfo(PeerID.from_base58(answer["peer"]), [Multiaddr(each) for each in answer["addresses"]])
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(shutdown_timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _module_of(expert_cls: str) -> str | None:
    """The module that registers a class of experts; ``None`` if there is no such class."""
    expert_class = layers.name_to_block.get(expert_cls)
    module = None if expert_class is None else expert_class.__module__
    if module == "__main__":
        raise ValueError(
            f"expert class {expert_cls!r} is defined in the program itself, which another process does not run: put it "
            "in a module, or give custom_module_path"
        )
    return module


def serve() -> NoReturn:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # modules may print

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        module, args, kwargs = pickle.load(sys.stdin.buffer)
        if module is not None:
            importlib.import_module(module)
        server = Server.create(*args, start=True, **kwargs)
    except BaseException as e:
        answer(error=f"{type(e).__name__}: {e}")
        sys.exit(1)
    answer(peer=server.dht.peer_id.to_base58(), addresses=[str(each) for each in server.dht.get_visible_maddrs()])

    def end() -> None:
        sys.stdin.buffer.read()
        server.shutdown()

    threading.Thread(target=end, daemon=True).start()
    server.join()
    sys.exit(0)
