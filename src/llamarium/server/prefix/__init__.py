"""Explains why a prompt's prefix was not cached, by comparing it with digests of earlier prompts."""
