"""A runner whose passes run in another process."""
