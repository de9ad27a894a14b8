"""User options, each declared once, as a field of a dataclass. Torch-free, without heavy imports."""
