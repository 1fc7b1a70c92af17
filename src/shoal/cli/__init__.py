"""The ``shoal`` command."""
