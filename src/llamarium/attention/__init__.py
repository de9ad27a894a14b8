"""Attention: objects that take q, k and v, keep what they need, and return the attention output."""

from llamarium.attention.base import Attend, CausalAttend, Context, CrossAttend, EagerAttend, attend_eagerly
from llamarium.attention.training import TrainingAttend

__all__ = ["Attend", "CausalAttend", "Context", "CrossAttend", "EagerAttend", "TrainingAttend", "attend_eagerly"]
