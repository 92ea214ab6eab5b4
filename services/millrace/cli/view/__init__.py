"""How runs are shown: live on a terminal, as plain lines elsewhere, as tables and plots."""
