"""The C kernels' runner, and the numpy arrays that the kernels read and write. Torch-free."""
