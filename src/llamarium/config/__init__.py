"""The configuration of a Llama model, with Hugging Face's field names.

Building, loading, costing and exporting a model all use `ModelConfig`. `huggingface.py` reads it from a `config.json`;
missing fields have the defaults of transformers.
"""

from llamarium.config.json_file import read_json_object
from llamarium.config.model import EMBEDDING, HEAD, ModelConfig
from llamarium.config.rope_scaling import RopeScaling, RopeType

__all__ = [
    "EMBEDDING",
    "HEAD",
    "ModelConfig",
    "RopeScaling",
    "RopeType",
    "read_json_object",
]
