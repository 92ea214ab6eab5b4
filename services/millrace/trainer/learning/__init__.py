"""What a training step computes: micro-batches, log-probs, loss, optimizer, and what was measured."""
