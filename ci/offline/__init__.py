"""Lanes on a GPU machine without a network: a bundle is built here and carried there."""
