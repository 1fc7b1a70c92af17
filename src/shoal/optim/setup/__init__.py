"""What is trained: the user's parameters, optimizer and schedule, and the state that they make together.

In reading order:

- :mod:`~.training_setup` normalizes what the user has given, or refuses it and says what to do instead.
- :mod:`~.optimizer_state` takes the statistics of an optimizer apart for sending, and puts received ones in place.
- :mod:`~.schedules` keeps learning rates at the epoch of the swarm.
- :mod:`~.training_state` puts these together: the tensors that are averaged, the state that a newcomer downloads, and
  checkpoints. What another peer has sent is checked here before anything changes.
- :mod:`~.devices` copies to and from accelerators, and waits for work that was launched there.
"""
