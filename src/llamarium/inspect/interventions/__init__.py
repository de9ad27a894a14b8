"""Interventions: edits, experiments, activations of a second prompt, and their effect."""
