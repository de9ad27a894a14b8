"""Files of `torch.save`, read without torch and without executing them."""
