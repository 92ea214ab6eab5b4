"""The trainer's side of a run's log: its hold on the run, and the batches in order."""
