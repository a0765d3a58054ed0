"""The lane ``doors``: the commands of the documents, run in a fresh clone."""
