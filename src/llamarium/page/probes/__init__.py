"""The page's probes: what it asks about the model and about passes. No torch at import."""
