"""What one looks at within a pass: a sampler's steps, heads, neurons, who wrote a logit, rotation, codes, learning."""
