"""Downloads of a state: :mod:`~.donor` offers and serves it, :mod:`~.download` takes it from several donors at once.

:mod:`~.gathering` decides which version a newcomer takes and from which donors, and :mod:`~.places` which newcomers a
donor serves.
"""
