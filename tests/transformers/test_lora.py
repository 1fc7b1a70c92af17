"""Adapters are trained together, while the frozen model beneath them stays at home."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import BitsAndBytesConfig, GPT2LMHeadModel

import shoal
from shoal.transformers import SwarmTrainer, fingerprint
from tests.transformers.small import make_arguments, make_data, make_model

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


def with_adapters(model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_that_of_the_files(checkpoint: Path, tmp_path: Path) -> None:
    whole = GPT2LMHeadModel.from_pretrained(checkpoint)
    halved = GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert fingerprint(whole).startswith("files ")
    assert fingerprint(whole) == fingerprint(halved) == fingerprint(with_adapters(halved))
    with_adapters(whole).save_pretrained(checkpoint)  # adapters beside it change nothing
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert fingerprint(whole) == fingerprint(halved)
    make_model(seed=1).save_pretrained(tmp_path / "other")
    assert fingerprint(GPT2LMHeadModel.from_pretrained(tmp_path / "other")) != fingerprint(whole)


def test_the_revision_on_the_hub_counts_first(checkpoint: Path) -> None:
    model = GPT2LMHeadModel.from_pretrained(checkpoint)
    model.config._commit_hash = "0123456789abcdef0123456789abcdef01234567"
    assert fingerprint(model) == "revision 0123456789abcdef"


def test_without_files_names_and_shapes_count(caplog: pytest.LogCaptureFixture) -> None:
    models = [with_adapters(make_model(seed)) for seed in (0, 1)]
    assert len({fingerprint(model) for model in models}) == 1
    assert [text for text in caplog.messages if "names and shapes" in text and "base='…'" in text]
    packed = models[0].get_base_model().transformer.wte.weight
    shape = packed.shape
    packed.data = packed.data[:2]
    assert fingerprint(models[0]) != fingerprint(models[1])
    packed.quant_state = torch.empty(shape)  # as a model in four bits has it
    assert fingerprint(models[0]) == fingerprint(models[1])


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("has_files", [True, False])
def test_four_bits_are_the_same_base(checkpoint: Path, has_files: bool) -> None:
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = GPT2LMHeadModel.from_pretrained(checkpoint, quantization_config=how, device_map="cpu")
    whole = GPT2LMHeadModel.from_pretrained(checkpoint)
    assert packed.transformer.h[0].attn.c_attn.weight.dtype == torch.uint8
    if not has_files:
        packed.name_or_path = whole.name_or_path = ""
    assert fingerprint(with_adapters(packed)) == fingerprint(with_adapters(whole))


# --- training ---------------------------------------------------------------------------------------------------------


def trainer_of_adapters(
    dht: shoal.DHT, folder: Path, model: Any, steps: int, batch: int, **options: Any
) -> SwarmTrainer:
    return SwarmTrainer(
        model,
        make_arguments(folder, max_steps=steps, optim="adamw_torch"),
        train_dataset=make_data(),
        dht=dht,
        run_id="lora",
        target_batch_size=batch,
        swarm_steps=3,
        **options,
    )


def test_a_trainer_trains_nothing_but_adapters(dht: shoal.DHT, checkpoint: Path, tmp_path: Path) -> None:
    model = with_adapters(GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.bfloat16))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = trainer_of_adapters(dht, tmp_path, model, steps=100, batch=8)
    sizes = []
    model.register_forward_pre_hook(lambda *_: sizes.append(trainer.swarm.state_averager.total_size))
    trainer.train()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(adapters_of(model))
    assert sizes[0] == sum(p.numel() for p in adapters_of(model).values()), "nothing else travels"


class Friend:
    """A peer with a loop of its own, without a Trainer."""

    def __init__(self, model: Any, run: str, initial_peers: list[Any], base: str | None = None) -> None:
        self.model = model
        self.dht = shoal.DHT(start=True, initial_peers=initial_peers, host_maddrs=LOOPBACK)
        # As the Trainer does: those without weight decay, which adapters have none of, are a group of their own.
        groups = [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": []}]
        self.optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id=run,
            target_batch_size=16,
            batch_size_per_step=4,
            optimizer=torch.optim.AdamW(groups, lr=1e-3),
            frozen_base=fingerprint(model) if base is None else base,
            delay_state_averaging=False,
            matchmaking_time=3.0,
            averaging_timeout=60.0,
            tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5},
        )

    def train(self, epochs: int) -> None:
        rows = torch.stack([row["input_ids"] for row in make_data(4)])
        while self.optimizer.local_epoch < epochs:
            self.model(input_ids=rows, labels=rows).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.shutdown()
        self.dht.shutdown()


def in_parallel(*jobs: Any) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_friends_with_one_base_in_different_types(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And somebody with another base is told at the door, as they are."""
    whole = with_adapters(GPT2LMHeadModel.from_pretrained(checkpoint), seed=1)
    halved = with_adapters(GPT2LMHeadModel.from_pretrained(checkpoint, dtype=torch.bfloat16), seed=2)
    first = Friend(whole, "friends", [])
    friends = [first, Friend(halved, "friends", first.dht.get_visible_maddrs())]
    try:
        in_parallel(*(lambda f=friend: f.optimizer.load_state_from_peers() for friend in friends))
        in_parallel(*(lambda f=friend: f.train(4) for friend in friends))
        last = [friend.optimizer.grad_averager.last_round for friend in friends]
        assert all(each is not None and len(each.peers) == 2 for each in last)
        mine, theirs = adapters_of(whole), adapters_of(halved)
        assert all(torch.equal(mine[name], theirs[name].to(mine[name].dtype)) for name in mine)
        assert not [text for text in caplog.messages if "frozen parameters" in text]
        stranger = Friend(with_adapters(make_model(seed=5)), "friends", first.dht.get_visible_maddrs())
        friends.append(stranger)
        assert not stranger.optimizer.load_state_from_peers()
        own, base = fingerprint(stranger.model), fingerprint(whole)
        assert [text for text in caplog.messages if text.startswith("donor") and own in text and base in text]
        assert [text for text in caplog.messages if str(stranger.dht.peer_id) in text and own in text]
    finally:
        in_parallel(*(friend.close for friend in friends))


def test_a_trainer_with_another_base_does_not_begin(dht: shoal.DHT, checkpoint: Path, tmp_path: Path) -> None:
    friend = Friend(with_adapters(GPT2LMHeadModel.from_pretrained(checkpoint)), "lora", dht.get_visible_maddrs())
    try:
        other = with_adapters(make_model(seed=3))
        trainer = trainer_of_adapters(dht, tmp_path, other, steps=2, batch=16, base="another")
        with pytest.raises(
            ValueError, match=r"do not train with this one:\n.*frozen base is 'files .*' there and 'another' here"
        ):
            trainer.train()
    finally:
        friend.close()


def test_one_that_differs_keeps_nobody_out(dht: shoal.DHT, checkpoint: Path, tmp_path: Path) -> None:
    """Anybody can refuse a newcomer; who gets a state from others begins."""
    bases = [with_adapters(GPT2LMHeadModel.from_pretrained(checkpoint)) for _ in range(3)]
    addresses = dht.get_visible_maddrs()
    others = [Friend(bases[0], "lora", addresses), Friend(bases[1], "lora", addresses, base="another")]
    try:
        trainer = trainer_of_adapters(dht, tmp_path, bases[2], steps=1, batch=16)
        refusals = []
        bases[2].register_forward_pre_hook(
            lambda *_: refusals.append(trainer.swarm.state_averager.node.state_downloads.contradictions)
        )
        trainer.train()
        assert refusals[0].keys() == {others[1].dht.peer_id}
    finally:
        in_parallel(*(friend.close for friend in others))
