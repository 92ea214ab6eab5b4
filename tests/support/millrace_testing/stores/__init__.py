"""Real S3 servers: how each is started, what is tried on it, and the page that says what came of it."""
