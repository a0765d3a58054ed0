"""Lanes on a GPU machine without a network, from a bundle of packages."""
