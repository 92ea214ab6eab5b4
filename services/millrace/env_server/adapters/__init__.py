"""Environments of `verifiers`, both generations, behind one surface, and the samples of what was played."""
