"""Claims: speculative greedy output equals plain greedy output, token for token."""
