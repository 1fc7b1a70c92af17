"""A peer that trains the same small model again and again, each time with other options, and says what it has seen.

Each line of its input is a task; see ``main``. It prints events as JSON lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from shoal import DHT, Optimizer

BATCH_SIZE, TARGET_BATCH_SIZE = 32, 512
TRAINERS = 3
MEETING_SECONDS = 60


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def flat(parameters: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(parameters).detach().clone()


class Digits:
    """Pictures of handwritten digits, a fifth of them for testing."""

    def __init__(self, seed: int) -> None:
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(1))
        self.pictures = torch.tensor(data.data, dtype=torch.float32)[order] / 6 - 0.8  # mean 0, variance 1
        self.labels = torch.tensor(data.target)[order]
        self.training = len(order) * 4 // 5
        self.generator = torch.Generator().manual_seed(seed)

    def loss_of_batch(self, model: torch.nn.Module) -> torch.Tensor:
        batch = torch.randint(self.training, (BATCH_SIZE,), generator=self.generator)
        return cross_entropy(model(self.pictures[batch]), self.labels[batch])

    @torch.no_grad()
    def accuracy(self, model: torch.nn.Module) -> float:
        guesses = model(self.pictures[self.training :]).argmax(dim=1)
        return (guesses == self.labels[self.training :]).float().mean().item()


class Observer:
    """Sees from the training loop what distinguishes one way of stepping from another."""

    def __init__(self, opt: Optimizer, model: torch.nn.Module) -> None:
        self.opt, self.model = opt, model
        self.steps = 0
        """Of the optimizer that makes the steps."""
        self.batches = 0
        self.staleness: list[int] = []
        """For each epoch: how many optimizer steps the model lacked when the first batch was computed."""
        self.gradients_under_way = 0
        """Epochs that began before the gradients of the last one were averaged."""
        self._latest_step: tuple[int, Any] = 0, None
        """Its number, and the last round of gradients at that time."""
        self.overlapped = 0
        """Batches that were begun while parameters were being averaged."""
        self.changed_at_once: list[bool] = []
        """Whether a batch had changed the model when ``step`` returned, outside of global steps."""
        self.full_rounds = self.helped_rounds = 0
        self._after_steps: deque[tuple[int, torch.Tensor]] = deque([(0, flat(model.parameters()))], maxlen=3)
        self._last_round: Any = None
        opt.opt.register_step_post_hook(self._note_step)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self.opt.grad_averager is not None:
            self._latest_step = self.steps, self.opt.grad_averager.last_round
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._after_steps.append((self.steps, flat(parameters)))

    def before_batch(self) -> None:
        self._epoch, self._model_before = self.opt.local_epoch, flat(self.model.parameters())
        self.overlapped += self.opt.state_averager.averaging_in_progress

    def after_batch(self) -> None:
        self.batches += 1
        now = flat(self.model.parameters())
        if self.opt.local_epoch == self._epoch:
            self.changed_at_once.append(not torch.equal(now, self._model_before))
            return
        if self.opt.grad_averager is not None:
            in_model, _ = min(list(self._after_steps), key=lambda item: (item[1] - now).norm().item())
            self.staleness.append(self.opt.local_epoch - in_model)
            step, round_of_step = self._latest_step
            has_no_later = self.opt.grad_averager.last_round is round_of_step
            self.gradients_under_way += step < self.opt.local_epoch and has_no_later
        self.note_round()

    def note_round(self) -> None:
        averager = self.opt.grad_averager or self.opt.state_averager
        latest = averager.last_round
        if latest is not self._last_round and len(latest.peers) - len(latest.auxiliaries) == TRAINERS:
            self.full_rounds += 1
            self.helped_rounds += bool(latest.auxiliaries)
        self._last_round = latest

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "batches": self.batches,
            "staleness": self.staleness,
            "gradients_under_way": self.gradients_under_way,
            "overlapped": self.overlapped,
            "changed_at_once": sum(self.changed_at_once),
            "batches_within_epochs": len(self.changed_at_once),
            "full_rounds": self.full_rounds,
            "helped_rounds": self.helped_rounds,
        }


def make_optimizer(dht: DHT, role: str, model: torch.nn.Module, task: dict[str, Any]) -> Optimizer:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=task["lr"], betas=(0.0, 0.9))

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task["epochs"])

    options: dict[str, Any] = dict(task["options"])
    if options.pop("from_function"):
        options |= {"optimizer": adam, "params": model.parameters(), "scheduler": schedule}
    else:
        optimizer = adam(model.parameters())
        options |= {"optimizer": optimizer, "scheduler": schedule(optimizer)}
    return Optimizer(
        dht=dht,
        run_id=task["task"],
        target_batch_size=TARGET_BATCH_SIZE,
        batch_size_per_step=None if role == "auxiliary" else BATCH_SIZE,
        auxiliary=role == "auxiliary",
        matchmaking_time=5.0,
        averaging_timeout=30.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
        **options,
    )


def train(opt: Optimizer, model: torch.nn.Module, digits: Digits, epochs: int) -> dict[str, Any]:
    observer = Observer(opt, model)

    def make_batch() -> None:
        observer.before_batch()
        if not opt.options.reuse_grad_buffers:
            opt.zero_grad()
        digits.loss_of_batch(model).backward()
        opt.step()
        observer.after_batch()

    make_batch()
    wait_for(lambda: opt.tracker.expected_group_size == TRAINERS, "all peers know each other")
    say(met=opt.run_id)
    assert sys.stdin.readline() == "train\n"
    while opt.local_epoch < epochs:
        make_batch()
    report = observer.report()
    opt.state_averager.finish_jobs(30)
    return {**report, "accuracy": digits.accuracy(model), "parameters": fingerprint(model)}


def help_others(opt: Optimizer, model: torch.nn.Module, epochs: int) -> dict[str, Any]:
    observer, before = Observer(opt, model), fingerprint(model)
    say(met=opt.run_id)
    assert sys.stdin.readline() == "train\n"
    while opt.local_epoch < epochs:
        opt.step()
        observer.note_round()
        time.sleep(0.002)  # stands for whatever else such a peer does
    return {**observer.report(), "unchanged": fingerprint(model) == before}


def fingerprint(model: torch.nn.Module) -> str:
    return hashlib.sha256(flat(model.parameters()).numpy().tobytes()).hexdigest()[:16]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + MEETING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it never came true that {what}"
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--role", choices=["peer", "client", "auxiliary"], default="peer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dht = DHT(initial_peers=args.initial_peers, start=True, client_mode=args.role == "client")
    say(address="" if args.role == "client" else str(dht.get_visible_maddrs()[0]))
    digits = Digits(args.seed)
    for line in sys.stdin:
        task = json.loads(line)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        opt = make_optimizer(dht, args.role, model, task)
        say(ready=task["task"])
        assert sys.stdin.readline() == "go\n"
        if args.role == "auxiliary":
            report = help_others(opt, model, task["epochs"])
        else:
            report = train(opt, model, digits, task["epochs"])
        say(done=task["task"], **report)
        assert sys.stdin.readline() == "leave\n"
        opt.shutdown()
        say(left=task["task"])
    dht.shutdown()


if __name__ == "__main__":
    main()
