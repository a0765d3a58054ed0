"""The lane ``doors``: what the documents tell a person to type is typed in a fresh clone."""
