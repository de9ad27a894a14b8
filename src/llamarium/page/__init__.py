"""The page of the glass box: what it asks of the server, and in what form. Never torch at import.

What it shows is `llamarium.inspect`'s, and can be had there as objects; here are the routes, their schema, the passes
that are kept, and the built bundle. The page's source is in `web/`.
"""
