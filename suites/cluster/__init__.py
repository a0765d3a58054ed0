"""Claims: batches on several nodes, which die, differ in kind or have other versions."""
