"""The gpu lane on a machine without a network: a bundle is built here and carried there."""
