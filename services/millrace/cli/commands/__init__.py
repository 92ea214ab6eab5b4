"""One file per command of `millrace`; each is imported only when it runs."""
