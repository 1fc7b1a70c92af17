"""The ``shoal doctor`` command: what may keep this machine from training with others, and what to do about it."""
