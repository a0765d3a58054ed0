"""Claims: each file is one sentence that must hold."""
