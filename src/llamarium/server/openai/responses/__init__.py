"""OpenAI's Responses API: input and output items, and stored responses."""
