"""The engine process and the HTTP process's connection to it."""
