"""The HTTP layer: request bodies, streaming, access control, connections and the log."""
