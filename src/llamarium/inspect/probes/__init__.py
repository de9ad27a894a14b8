"""Probes of a pass: sampler steps, heads, neurons, attribution of a logit, rotation, codes, learning, a pass as a picture."""
