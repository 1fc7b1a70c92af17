"""Addresses as people want to see them, under the import path that users know."""

from shoal.p2p.visible_addresses import LOCALHOST, choose_ip_address, log_visible_maddrs

__all__ = ["LOCALHOST", "choose_ip_address", "log_visible_maddrs"]
