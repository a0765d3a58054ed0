"""What a server must do, over HTTP."""
