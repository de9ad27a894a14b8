"""Interventions in a pass. All modules except `effect` and `variants` import torch: import them within functions."""
