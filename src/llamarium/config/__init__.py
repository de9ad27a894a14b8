"""The configuration of a Llama, in Hugging Face's field names.

`ModelConfig` is the one description that building, loading, costing and exporting a model read. `huggingface.py` reads
it from a `config.json`, with the published defaults of transformers where a field is missing.
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
