"""A model that no single peer holds: each has some of its layers, and microbatches travel from peer to peer."""
