"""Claims: our backends as a server of sglang calls them."""
