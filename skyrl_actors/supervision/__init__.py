"""Keep groups of ranks and engines alive: health, restarts, and the pauses between them."""
