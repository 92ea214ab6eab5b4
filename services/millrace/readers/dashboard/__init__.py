"""The log of runs in a browser: pages, their JSON, and the process that reads for them."""
