"""A server's lifecycle: its state (loading, ready, draining or broken), signals, and the status line."""
