"""A small GPT-2 with the Trainer of Hugging Face that two terminals, or two machines, train together.

First one:   python examples/huggingface.py
Second one:  python examples/huggingface.py ADDRESS      (the address that the first one prints)

The model begins with random weights, and learns to count; nothing is downloaded. The second one takes over the state of
the first. They train until you stop them with Ctrl-C. Needs packages of Hugging Face. In the folder of this source:
pip install '.[transformers]'
"""

import sys
import time

import torch

import shoal

try:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, TrainerCallback

    from shoal.transformers import SwarmTrainer
except ModuleNotFoundError as error:
    sys.exit(f"{error}. In the folder of shoal's source: pip install '.[transformers]'")

torch.set_num_threads(1)  # the model is tiny, and the peers may share one machine

rows = [(torch.arange(32) * step + start) % 100 for start in range(100) for step in range(1, 10)]
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    "huggingface_checkpoints",
    per_device_train_batch_size=16,
    max_steps=10**9,  # of this peer; the run ends after its swarm steps
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    logging_steps=20,
    disable_tqdm=True,  # its bar would count the steps of this peer alone
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)


class Tell(TrainerCallback):
    """Says how it goes, in place of the usual callback."""

    began = time.monotonic()

    def on_log(self, args, state, control, logs, **others):
        if "loss" in logs:
            told = "step {swarm_epoch:.0f}, loss {loss:.3f}, peers: {swarm_peers:.0f}, this one {rate:,.0f} samples/s"
            figures = {name: float(value) for name, value in logs.items()}
            told = told.format(rate=figures["swarm_samples_per_second"], **figures)
            print(f"{time.monotonic() - self.began:.0f} s: {told}", flush=True)


try:
    with shoal.DHT(initial_peers=sys.argv[1:], start=True) as dht:
        print("Others join with: python examples/huggingface.py", dht.address, flush=True)
        trainer = SwarmTrainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            dht=dht,
            run_id="huggingface_example",  # peers with the same name train together
            target_batch_size=128,  # samples that all peers together gather for one step
            swarm_steps=20_000,  # the length of the schedule; then training ends
            swarm_options={"matchmaking_time": 2.0},  # seconds to wait for peers that are late
            callbacks=[Tell()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
except KeyboardInterrupt:
    print("Stopped. The others carry on.")  # the end of train() has told them
