"""HTTP: bodies, streams, access, connections and the log."""
