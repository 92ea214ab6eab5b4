"""What differs between releases of `verifiers`: which ones are hosted, and where their parts are."""
