"""Downloads of a state: :mod:`~.donor` offers and serves it, :mod:`~.download` takes it from several donors at once.

:mod:`~.multi_source` decides which version a newcomer takes and from which donors, and :mod:`~.upload_slots` which
newcomers a donor serves.
"""
