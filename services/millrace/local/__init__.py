"""The one-machine stack: embedded Redis and object store, every service as its own supervised process."""
