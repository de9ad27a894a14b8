"""Clients: who is let in, and what all of them ask of the server."""
