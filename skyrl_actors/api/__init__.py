"""HTTP: convert requests and results, check API keys, and serve data to the console."""
