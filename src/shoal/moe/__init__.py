"""Experts: modules that a server runs for others, and mixtures of them."""

import shoal.base.needs_torch  # noqa: F401
from shoal.moe.declare import declare_experts, get_experts
from shoal.moe.expert import RemoteExpert
from shoal.moe.mixture import RemoteMixtureOfExperts
from shoal.moe.switch import RemoteSwitchMixtureOfExperts

__all__ = [
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "declare_experts",
    "get_experts",
]
