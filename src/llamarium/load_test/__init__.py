"""A load generator for OpenAI-compatible servers, over HTTP alone: times, counts and percentiles. Never torch.

`workload` makes the requests, the same ones for the same seed; `drive` sends them, from some clients or at arrival
times. `client` times one over HTTP, `chunks` reads its events, `exchange` keeps its measures, `summary` those of all.
"""
