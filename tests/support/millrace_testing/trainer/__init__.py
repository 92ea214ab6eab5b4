"""Programs that tests of the trainer start, and losses that they name."""
