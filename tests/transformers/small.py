"""A small random GPT-2, sequences that it can learn, and arguments for short training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

WORDS, LENGTH = 64, 16
# Without dropout, so that runs can be compared.
CONFIG: dict[str, Any] = dict(
    n_layer=2, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip


def make_model(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(**CONFIG))


def make_data(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Each number follows from the one before."""
    rows = [(torch.arange(LENGTH) * 5 + start) % WORDS for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = dict(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", optim="sgd",
        per_device_train_batch_size=4, learning_rate=0.5, max_grad_norm=0.5, logging_steps=1,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return TrainingArguments(**{**defaults, **options})
