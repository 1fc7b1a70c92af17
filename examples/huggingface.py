"""A small GPT-2 with the Trainer of Hugging Face that two terminals, or two machines, train together.

First terminal:   python examples/huggingface.py
Second terminal:  python examples/huggingface.py ADDRESS, with the address that the first one prints

The model begins with random weights, and learns to count; nothing is downloaded. Start the second one while the first
trains: it takes over the first one's state. Needs: pip install 'shoal[transformers]'
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import shoal
from shoal.transformers import SwarmTrainer

torch.set_num_threads(1)  # the model is tiny, and the peers may share one machine

rows = [(torch.arange(32) * step + start) % 100 for start in range(100) for step in range(1, 10)]
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0)
)
arguments = TrainingArguments(
    "huggingface_checkpoints",
    per_device_train_batch_size=16,
    num_train_epochs=100,  # of this peer; the run ends after its swarm steps
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    logging_steps=20,
    disable_tqdm=True,  # its bar would count the steps of this peer alone
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)
try:
    with shoal.DHT(initial_peers=sys.argv[1:], start=True) as dht:
        print("Others join with: python", sys.argv[0], dht.get_visible_maddrs()[0], flush=True)
        trainer = SwarmTrainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            dht=dht,
            run_id="huggingface_example",  # peers with the same name train together
            target_batch_size=128,  # samples that all peers together gather for one step
            swarm_steps=200,  # the length of the schedule; then training ends
            swarm_options={"matchmaking_time": 2.0},  # seconds to wait for peers that are late
        )
        trainer.train()
except KeyboardInterrupt:
    print("Stopped. The others carry on.")  # the end of train() has told them
