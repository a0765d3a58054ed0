"""Clients of sglang's and vLLM's HTTP interfaces."""
