"""Our backends inside an unmodified sglang server, by its plugin interface."""
