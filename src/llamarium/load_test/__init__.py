"""A load generator for OpenAI-compatible HTTP servers: latencies, token counts and percentiles. Torch-free.

`workload` creates requests, reproducibly from a seed. `drive` sends them, in a closed loop of clients or at arrival
times. `client` measures one request, `chunks` parses its events, `exchange` stores its measurements, and `summary`
aggregates those of all requests.
"""
