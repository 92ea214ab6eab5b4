"""Environments of `verifiers`, both generations, with one interface, and the samples of what was played."""
