"""The HTTP interface of the embedded server."""
