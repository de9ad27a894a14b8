"""The one place where past tokens exist: objects that take q, k and v and return what the queries see."""

from llamarium.attention.base import Attend, Context, attend_eagerly
from llamarium.attention.causal import CausalAttend
from llamarium.attention.cross import CrossAttend
from llamarium.attention.eager import EagerAttend
from llamarium.attention.training import TrainingAttend

__all__ = ["Attend", "CausalAttend", "Context", "CrossAttend", "EagerAttend", "TrainingAttend", "attend_eagerly"]
