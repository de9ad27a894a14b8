"""The page of the glass box: its routes and their schema. No torch at import.

The numbers come from `llamarium.inspect`; here are the routes, the kept passes and the built bundle. The page's source
is in `web/`.
"""
