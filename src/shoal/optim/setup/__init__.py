"""What is trained: the user's parameters, optimizer and schedule, and the state that they form together.

In reading order:

- :mod:`~.training_setup` normalizes the user's arguments, or refuses them and says what to do instead.
- :mod:`~.optimizer_state` takes the statistics of an optimizer apart for sending, and puts received ones in place.
- :mod:`~.schedules` keeps learning rates at the epoch of the swarm.
- :mod:`~.training_state` puts these together: the averaged tensors, the state that a newcomer downloads, and
  checkpoints. It checks states of other peers before anything changes.
- :mod:`~.devices` copies to and from accelerators, and waits for work that was launched there.
"""
