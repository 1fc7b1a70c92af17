"""``shoal demo``: a swarm on one machine that loses a peer, gains a peer, and keeps training."""
