"""Claims: lanes, gates and reports."""
