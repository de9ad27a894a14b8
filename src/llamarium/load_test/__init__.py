"""A load generator for OpenAI-compatible servers, over HTTP alone: times, counts and percentiles. Never torch.

`workload` makes the requests, the same ones for the same seed, and `drive` sends them: from a number of clients, or at
arrival times. `client` times one request over HTTP, `chunks` reads its events, `exchange` is what was measured of it,
`summary` what was measured of all.
"""
