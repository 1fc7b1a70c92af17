"""The ``shoal doctor`` command: finds what may keep this machine from training with others, and says how to fix it."""
