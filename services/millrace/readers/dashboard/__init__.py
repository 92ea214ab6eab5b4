"""The log of runs in a browser: pages, the JSON behind them, and the process that reads for them."""
