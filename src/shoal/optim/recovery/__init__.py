"""Getting the state of the others: when (:mod:`~.synchronization`), who waits meanwhile (:mod:`~.joiner_grace`), and
how the state is taken apart, tried, and put back (:mod:`~.state_holder`).
"""
