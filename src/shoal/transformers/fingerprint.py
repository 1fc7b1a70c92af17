"""Names the frozen model that adapters belong to: peers that train adapters together must have the same one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import blake3

from shoal.compression.base import plain_name

logger = logging.getLogger(__name__)

# Digits of a fingerprint. Chosen: enough that no two are equal by chance, and few enough to compare by eye.
_DIGITS = 16


def fingerprint(model: Any) -> str:
    """Name the frozen model that adapters belong to, in a short text that is the same in all peers with this model.

    It is the revision on the hub, or a hash of the checkpoint's files. One peer may hold the model in bf16 and another
    in 4 bits: the files that were loaded count, not the precision in memory. A model that came from neither is named
    only by the names and shapes of its frozen parameters, with a warning.

    Args:
        model: as ``from_pretrained`` returns it, or with adapters of peft.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    revision = getattr(getattr(base, "config", None), "_commit_hash", None)
    if revision:
        return f"revision {revision[:_DIGITS]}"
    folder = getattr(base, "name_or_path", "")
    if folder and (files := _weights_in(Path(folder))):
        digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
        for file in files:
            digest.update(f"{file.name}:{file.stat().st_size};".encode())
            digest.update_mmap(file)
        return f"files {digest.hexdigest()[:_DIGITS]}"
    logger.warning(
        "the base model is neither from the hub nor from files: other weights would go unnoticed, as only names and "
        "shapes are compared. Name it: base='…'"
    )
    frozen = sorted(f"{plain_name(name)}:{_shape_of(p)}" for name, p in base.named_parameters() if not p.requires_grad)
    return f"names and shapes {blake3.blake3(';'.join(frozen).encode()).hexdigest()[:_DIGITS]}"


def _weights_in(folder: Path) -> list[Path]:
    """The files with the weights of a checkpoint, in order, without the adapters beside them."""
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return [file for file in found if not file.name.startswith("adapter_")]


def _shape_of(parameter: Any) -> tuple[int, ...]:
    """The shape that a parameter has when it is not packed into 4 bits; sorted, because packing may transpose it."""
    packed = getattr(parameter, "quant_state", None)
    return tuple(sorted(parameter.shape if packed is None else packed.shape))
