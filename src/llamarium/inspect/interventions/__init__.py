"""What changes if something in a pass is another: edits, experiments, activations of a second prompt."""
