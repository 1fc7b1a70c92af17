"""A loop of one's own with accelerate: ``prepare`` takes shoal's optimizer as it is."""

from __future__ import annotations

import accelerate
import torch
from torch.utils.data import DataLoader

import shoal
from tests.transformers.small import make_data, make_model

BATCHES, BATCH = 8, 4


def train(optimizer: torch.optim.Optimizer, model: torch.nn.Module, batches_per_step: int) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=batches_per_step)
    loader = DataLoader(make_data(BATCHES * BATCH), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def test_steps_are_those_of_plain_accelerate(dht: shoal.DHT) -> None:
    """Accelerate adds the gradients of two batches, and shoal those of two such steps; in all, four batches."""
    plain, together = make_model(), make_model()
    train(torch.optim.SGD(plain.parameters(), lr=0.5), plain, 4)
    with shoal.Optimizer(
        dht=dht,
        run_id="accelerated",
        target_batch_size=4 * BATCH,
        batch_size_per_step=2 * BATCH,
        optimizer=torch.optim.SGD(together.parameters(), lr=0.5),
        delay_state_averaging=False,
        model=together,
    ) as optimizer:
        train(optimizer, together, 2)
        assert optimizer.local_epoch == 2
    for name, parameter in plain.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], parameter, msg=name)
