"""The runner over the C kernels, and the numpy arrays over the memory that these read and write. Never torch."""
