"""A server's lifecycle: loading, ready, draining or broken; signals; the status line."""
