"""What pages show, as plain data: each module answers one question about a run from its log."""
