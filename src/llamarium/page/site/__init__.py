"""The page as files for any static host, whose numbers the browser computes. Needs neither torch nor a server.

The scripts that the site has besides the page are in `web/src/site` and `web/src/engine`.
"""
