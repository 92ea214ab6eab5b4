"""The trainer: reads batches from a run's log, steps the optimizer, publishes policies, writes checkpoints; also SFT."""
