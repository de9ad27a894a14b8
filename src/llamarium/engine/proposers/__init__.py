"""Proposers guess a sequence's next tokens, which a step runs along and checks: n-gram lookup, and a draft model."""
