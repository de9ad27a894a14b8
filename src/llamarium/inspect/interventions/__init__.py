"""Interventions in a pass. All modules but `effect` and `variants_in_c` import torch: import them within functions."""
