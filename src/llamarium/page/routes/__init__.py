"""The page's routes, below /inspect."""
