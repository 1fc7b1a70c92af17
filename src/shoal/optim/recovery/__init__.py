"""Getting the state of the others. Both optimizers use :mod:`~.when` and :mod:`~.download`.

- :mod:`~.when` decides whether a peer needs a state, and paces the attempts.
- :mod:`~.download` tries the states of donors, one after another, until one can be taken over.
- :mod:`~.adopt` holds the training state: takes it apart, puts another one in its place, and restores the old one.
- :mod:`~.joiner_grace`: a donor that trains alone waits for its newcomers.
"""
