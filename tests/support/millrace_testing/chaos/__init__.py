"""A stack whose processes are killed, frozen and damaged while it trains."""
