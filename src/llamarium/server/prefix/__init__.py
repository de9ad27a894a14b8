"""Why a prompt's prefix was not cached: earlier prompts as digests, and what differs from the nearest one."""
