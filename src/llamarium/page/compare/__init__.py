"""What the page holds against the pass that answers: the model stored otherwise, its adapters, a run's checkpoints."""
