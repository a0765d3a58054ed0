"""Claims: speculative greedy output equals the target's own greedy output, token for token."""
