"""The one place where past tokens exist: objects that take q, k and v and return what the queries see."""

from llamarium.attention.base import Attend, Context, attend_eagerly
from llamarium.attention.cached import CachedAttend, KVCache
from llamarium.attention.causal import CausalAttend
from llamarium.attention.cross import CrossAttend
from llamarium.attention.eager import EagerAttend
from llamarium.attention.recording import RecordingAttend

__all__ = [
    "Attend",
    "CachedAttend",
    "CausalAttend",
    "Context",
    "CrossAttend",
    "EagerAttend",
    "KVCache",
    "RecordingAttend",
    "attend_eagerly",
]
