"""The page as files for a static host, where the browser runs the model. Needs neither torch nor a server.

The additional scripts of the site are in `web/src/site` and `web/src/engine`.
"""
