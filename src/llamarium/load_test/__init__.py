"""A load generator for OpenAI-compatible servers: what is asked, when, and what became of it. Never torch.

    lengths      how many tokens a prompt and an answer have: a number or a distribution
    workload     the requests, the same ones for the same seed
    exchange     what is known of one request: times, counts, what went wrong
    events       server-sent events, out of bytes as they come
    chunks       what an event says
    client       one request over HTTP, timed; whether a server is ready
    drive        when requests are sent: in a closed loop of clients, or at times of their own
    goal         what a good answer keeps to
    summary      percentiles, throughput, goodput, errors

It knows servers by HTTP alone, ours like any other.
"""
