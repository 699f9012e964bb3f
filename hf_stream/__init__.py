"""Stream checkpoints from any layout to any other, one bounded buffer at a time."""
