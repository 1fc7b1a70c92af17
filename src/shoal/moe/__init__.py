"""Experts: modules that a server runs for others, and mixtures of them."""
