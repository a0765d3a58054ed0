"""Claims: servers, over HTTP."""
