"""The routes that belong to no protocol."""
