"""How a server begins and ends: the model on its way, ready, draining or broken; signals; the live line."""
