"""What of a run's rollouts is kept beside the archive, so that a page of samples needs no archive."""
