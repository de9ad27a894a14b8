"""The inspection page of the server: routes and their schema. No torch at import.

The numbers come from `llamarium.inspect`; this package has the routes, the cache of forward passes, and the built
bundle. The page's source is in `web/`.
"""
