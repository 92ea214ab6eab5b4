"""What Redis has lost or never had, out of the store."""
