"""The trainer: reads batches of a run's log, steps the optimizer, publishes policies, saves checkpoints; also SFT."""
