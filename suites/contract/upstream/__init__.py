"""Claims: SGLang's data structures and released wheels."""
