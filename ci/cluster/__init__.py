"""One verdict from many machines: batches of work as tasks of a Ray cluster."""
