"""A server of experts in its own process.

The parent sends the arguments to the child's standard input and keeps it open; when it closes, the server shuts down.
The child answers with one line of JSON: its peer, or the error.
"""

from __future__ import annotations

import contextlib
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
    """
    message = pickle.dumps((args, kwargs, _registered(kwargs)))
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


def _registered(kwargs: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The class of experts that only this process has registered."""
    name = kwargs.get("expert_cls")
    expert_class = layers.name_to_block.get(str(name))
    if expert_class is None or expert_class.__module__ == layers.__name__ or kwargs.get("custom_module_path"):
        return None
    entry = str(name), expert_class, layers.name_to_input[str(name)]
    try:
        pickle.dumps(entry)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise TypeError(f"expert class {name!r} cannot go to another process, use custom_module_path: {e}") from None
    return entry


def serve() -> NoReturn:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # modules may print

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        args, kwargs, registered = pickle.load(sys.stdin.buffer)
        if registered is not None:
            name, expert_class, sample_input = registered
            layers.register_expert_class(name, sample_input)(expert_class)
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
