"""Which token comes next: the parameters, the row that a request is, the sampler in C and in PyTorch."""
