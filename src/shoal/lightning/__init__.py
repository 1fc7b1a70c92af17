"""Lightning: utilities."""
