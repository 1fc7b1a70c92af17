"""A peer that trains a small GPT-2 with a ``SwarmTrainer``, in a process of its own; prints events as JSON lines."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from typing import Any

import torch
import tqdm
from transformers import PrinterCallback, TrainerCallback

import shoal
from shoal.transformers import SwarmTrainer
from tests.transformers.small import make_arguments, make_data, make_model


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Tell(TrainerCallback):
    """Tells of each swarm step, and ends when the test says so."""

    def __init__(self, trainer: SwarmTrainer, stop: threading.Event) -> None:
        self.trainer, self.stop, self.told, self.known_round = trainer, stop, 0, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.02)  # stands for the work of a larger model
        swarm = self.trainer.swarm
        assert swarm is not None
        control.should_training_stop = self.stop.is_set() or control.should_training_stop
        if swarm.local_epoch == self.told:
            return
        self.told = swarm.local_epoch
        assert swarm.grad_averager is not None
        last = swarm.grad_averager.last_round
        group = [] if last is None or last is self.known_round else sorted(map(str, last.peers))
        self.known_round = last
        content = b"".join(p.detach().numpy().tobytes() for p in self.trainer.model.parameters())
        say(epoch=self.told, group=group, parameters=hashlib.sha256(content).hexdigest()[:16])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        say(logs=logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="for checkpoints, of which there are none")
    parser.add_argument("--initial-peers", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0
    with shoal.DHT(start=True, initial_peers=args.initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        say(address=str(dht.get_visible_maddrs()[0]), peer_id=str(dht.peer_id))
        trainer = SwarmTrainer(
            make_model(seed=len(args.initial_peers)),
            make_arguments(args.folder, optim="adamw_torch", learning_rate=3e-3, num_train_epochs=1e4, logging_steps=5),
            train_dataset=make_data(),
            dht=dht,
            run_id="gpt2",
            target_batch_size=64,
            swarm_steps=1000,
            swarm_options={
                "matchmaking_time": 5.0,
                "averaging_timeout": 60.0,
                "tracker_opts": {"min_refresh_period": 0.2, "default_refresh_period": 0.5},
            },
        )
        stop = threading.Event()
        threading.Thread(target=lambda: sys.stdin.readline() and stop.set(), daemon=True).start()
        trainer.remove_callback(PrinterCallback)  # it prints to where events go
        trainer.add_callback(Tell(trainer, stop))
        trainer.train()
        say(done=True)


if __name__ == "__main__":
    main()
