"""The C kernels' bindings and fast CPU functions; tests compare each with a readable reference."""
