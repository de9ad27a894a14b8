"""A load generator for OpenAI-compatible servers, over HTTP alone. Never torch.

workload     the requests and their lengths, the same ones for the same seed
exchange     one request's times, counts and failure; latency limits of a good answer
chunks       server-sent events and their content
client       one request over HTTP, timed; whether a server is ready
drive        the loops: closed with a number of clients, or open with arrival times
summary      percentiles, throughput, goodput, errors
"""
