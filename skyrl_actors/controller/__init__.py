"""Accept a request, order it, run it, restore models, and expire sessions."""
