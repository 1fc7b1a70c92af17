"""Downloads of a state: :mod:`~.donor` gives what it has, :mod:`~.download` takes from several donors at once."""
