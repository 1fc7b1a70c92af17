"""Adapters (LoRA) that friends train together, while the frozen model beneath them is never sent.

First one:   python examples/lora.py
Second one:  python examples/lora.py ADDRESS      (the address that the first one prints)

They train until you stop them with Ctrl-C, and write the adapters to the folder lora_adapters. Only adapters are sent.
Each peer loads the model itself: with --base, a checkpoint of your own or a name on the hub, the same at all peers.
Without it, they make the same small model with random weights, and nothing is downloaded.
Needs packages of Hugging Face. In the folder of this source: pip install '.[transformers]'
"""

import argparse
import sys
import time

import torch

import shoal

try:
    import peft
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, TrainerCallback

    from shoal.transformers import SwarmTrainer
except ModuleNotFoundError as error:
    sys.exit(f"{error}. In the folder of shoal's source: pip install '.[transformers]'")

torch.set_num_threads(1)  # the model is small, and the peers may share one machine

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("initial_peers", nargs="*", metavar="ADDRESS")
parser.add_argument("--base", help="folder of a checkpoint, or a name on the hub (default: a small model)")
parser.add_argument("--steps", type=int, default=20_000, help="steps that all peers make together")
options = parser.parse_args()

if options.base:
    base, name = AutoModelForCausalLM.from_pretrained(options.base), None  # known by its revision, or its files
else:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    base = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32, initializer_range=0.2))
    name = "the small model of examples/lora.py"  # it comes from no files by which peers could compare it

model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
model.print_trainable_parameters()

rows = [(torch.arange(32) * step + start) % 100 for start in range(100) for step in range(1, 10)]  # it learns to count
arguments = TrainingArguments(
    "lora_checkpoints",
    per_device_train_batch_size=16,
    max_steps=10**9,  # of this peer; the run ends after its swarm steps
    learning_rate=2e-2,
    lr_scheduler_type="cosine",
    logging_steps=10,
    disable_tqdm=True,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
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
    with shoal.DHT(initial_peers=options.initial_peers, start=True) as dht:
        print("Others join with: python examples/lora.py", dht.address, flush=True)
        trainer = SwarmTrainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            dht=dht,
            run_id="lora",  # peers with the same name train together
            target_batch_size=128,  # samples that all peers together gather for one step
            swarm_steps=options.steps,
            swarm_options={"matchmaking_time": 2.0},  # seconds to wait for peers that are late
            base=name,
            callbacks=[Tell()],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            model.save_pretrained("lora_adapters")  # the adapters alone: a small file
            print("The adapters are in lora_adapters.", flush=True)
except KeyboardInterrupt:
    print("Stopped. The others carry on.")  # the end of train() has told them
