"""A training script as a user would write it, small enough to run on one core; prints what happens as JSON lines."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import json
import resource
import signal
import sys
import threading
import time

import psutil
import torch
from torch import nn

CLASSES, PIXELS = 10, 64
LEAK_GRACE_SECONDS = 5


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


# Before shoal is imported, so that it runs after shoal's own exit handler. What comes after it is torch's clean-up.
atexit.register(lambda: say(gone=time.monotonic()))

from shoal import DHT, Optimizer  # noqa: E402


def digits(generator: torch.Generator, count: int, prototypes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy 8×8 pictures of ten classes: what the well-known digits look like to a small network."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return prototypes[labels] + 0.7 * torch.randn(count, PIXELS, generator=generator), labels


def fingerprint(model: nn.Module) -> str:
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def left_behind() -> list[str]:
    """Threads, sockets and processes that are still there a while after everything was shut down."""
    deadline = time.monotonic() + LEAK_GRACE_SECONDS
    while True:
        process = psutil.Process()
        left = [f"socket {s.laddr} {s.raddr}" for s in process.net_connections("inet")]
        left += [f"process {child}" for child in process.children(recursive=True)]
        left += [
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if thread is not threading.main_thread() and not thread.name.startswith("shoal-")
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def train(args: argparse.Namespace, opt: Optimizer, model: nn.Module) -> None:
    prototypes = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(args.seed)
    epoch, known_round, began = opt.local_epoch, None, time.monotonic()
    while epoch < args.epochs:
        pictures, labels = digits(generator, args.batch_size, prototypes)
        loss = nn.functional.cross_entropy(model(pictures), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if args.report_steps:
            say(step=opt.local_epoch)
        time.sleep(args.pause)  # stands for the work of a larger model
        if opt.local_epoch != epoch:
            epoch, last_round = opt.local_epoch, opt.grad_averager.last_round
            new_round = last_round is not None and last_round is not known_round
            say(
                epoch=epoch,
                loss=loss.item(),
                parameters=fingerprint(model),
                group=sorted(map(str, last_round.peers)) if new_round else [],
                seconds=time.monotonic() - began,
                peers=opt.tracker.global_progress.num_peers,
                peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            )
            known_round, began = last_round, time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--target-batch-size", type=int, default=1024)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between steps")
    parser.add_argument("--matchmaking-time", type=float, default=2.0)
    parser.add_argument("--averaging-timeout", type=float, default=20.0)
    parser.add_argument("--delay-state-averaging", action="store_true")
    parser.add_argument("--catch-interrupt", action="store_true")
    parser.add_argument("--report-steps", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have it ignored

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    dht = DHT(initial_peers=args.initial_peers, start=True)
    say(address=str(dht.get_visible_maddrs()[0]), peer_id=str(dht.peer_id))
    opt = Optimizer(
        dht=dht,
        run_id="system_test",
        target_batch_size=args.target_batch_size,
        batch_size_per_step=args.batch_size,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        matchmaking_time=args.matchmaking_time,
        averaging_timeout=args.averaging_timeout,
        delay_state_averaging=args.delay_state_averaging,
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
    )
    say(ready=True)
    assert sys.stdin.readline() == "go\n"

    with contextlib.suppress(*([KeyboardInterrupt] if args.catch_interrupt else [])):
        train(args, opt, model)
    opt.shutdown()
    dht.shutdown()
    down = time.monotonic()
    left = left_behind()
    say(left=left, looked_for_leaks=time.monotonic() - down)


if __name__ == "__main__":
    main()
