"""The `millrace` command. Nothing heavy is imported before a command runs: `millrace --help` answers in 150 ms."""
