"""Clients that people use, without what they do beside asking: no telemetry, no network, nothing that stays."""

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import ModuleType
from unittest import mock


@contextmanager
def quiet_litellm() -> Iterator[ModuleType]:
    """LiteLLM with the prices that it came with, and with threads and an event loop that end with the block."""
    with ThreadPoolExecutor() as pool, ExitStack() as changes:
        changes.enter_context(mock.patch.dict(os.environ, LITELLM_LOCAL_MODEL_COST_MAP="True"))
        changes.enter_context(mock.patch.object(sys, "path", sys.path.copy()))  # it adds the working directory
        import litellm  # takes seconds, which only its own tests should pay
        from litellm.litellm_core_utils import streaming_handler

        for module in (litellm.utils, streaming_handler):
            changes.enter_context(mock.patch.object(module, "executor", pool))
        for name, value in {"telemetry": False, "suppress_debug_info": True}.items():
            changes.enter_context(mock.patch.object(litellm, name, value))
        asyncio.set_event_loop(changes.enter_context(closing(asyncio.new_event_loop())))
        changes.callback(asyncio.set_event_loop, None)
        yield litellm


@contextmanager
def quiet_langchain() -> Iterator[None]:
    """LangChain whose traces go nowhere."""
    with mock.patch.dict(os.environ, LANGSMITH_TRACING="false", LANGCHAIN_TRACING_V2="false"):
        yield
