"""Experts: modules that a server runs for others, and mixtures of them."""

import shoal.base.needs_torch  # noqa: F401
from shoal.base.inherited import offer_modules
from shoal.moe.backend import ModuleBackend
from shoal.moe.background import background_server
from shoal.moe.declare import declare_experts, get_experts
from shoal.moe.expert import RemoteExpert
from shoal.moe.expert_server import Server
from shoal.moe.layers import register_expert_class
from shoal.moe.mixture import RemoteMixtureOfExperts
from shoal.moe.switch import RemoteSwitchMixtureOfExperts

__all__ = [
    "ModuleBackend",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "Server",
    "background_server",
    "declare_experts",
    "get_experts",
    "register_expert_class",
]

offer_modules("shoal.moe")
