"""Folders of `llamarium build`, as models."""
