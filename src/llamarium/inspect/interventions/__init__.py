"""Interventions in a pass. All modules but `effect` and `variants` import torch: import them within functions."""
