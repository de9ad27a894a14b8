"""A load generator for OpenAI-compatible servers, over HTTP alone. Never torch.

lengths      lengths of prompts and answers: a number or a distribution
workload     the requests, the same ones for the same seed
exchange     one request's times, counts and failure
chunks       server-sent events and their content
client       one request over HTTP, timed; whether a server is ready
drive        the loops: closed with a number of clients, or open with arrival times
goal         latency limits of a good answer
summary      percentiles, throughput, goodput, errors
"""
