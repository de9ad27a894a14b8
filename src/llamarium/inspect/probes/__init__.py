"""Probes of a pass: sampler steps, heads, neurons, attribution, rotation, codes, learning, a picture."""
