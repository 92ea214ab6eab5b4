"""The `millrace` command. Importing it loads no large package, so that `millrace --help` answers within 150 ms."""
