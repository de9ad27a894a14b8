"""OpenAI's batch format: reads requests from a file, runs them with the server's routes, and writes the answers."""
