"""What only reads the log of a run: dashboard, audit, repair, replay and exports. No service imports it."""
