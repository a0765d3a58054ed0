"""Claims: what is sent to a cluster, what comes back, and what becomes of losses."""
