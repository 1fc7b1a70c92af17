"""The user's model, optimizer and schedule: what they are, and their state, taken apart and put together."""
