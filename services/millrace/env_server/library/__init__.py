"""Differences between releases of `verifiers`: which releases are hosted, and where their parts are."""
