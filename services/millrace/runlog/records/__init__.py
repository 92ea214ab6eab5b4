"""What the store holds of a run besides batches and events: small create-only objects."""
