"""OpenAI's batch format: requests from a file, to the same routes as over HTTP, and answers into another."""
