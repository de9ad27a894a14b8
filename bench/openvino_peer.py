"""OpenVINO's side of `compare_cpu.py`: a program of its own, for an environment of its own.

    python -m venv ov && ov/bin/pip install openvino-genai numpy
    python bench/compare_cpu.py --openvino-python ov/bin/python ...

It reads the same GGUF file, through the reader of openvino-genai, and runs `LLMPipeline` as it comes. For each line
`[prompt tokens, new tokens]` on standard input it answers with `[seconds to the first token, seconds of each further
one]`. The prompt is another one each time, since the pipeline keeps what it knows of earlier ones.
"""

import json
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    """Load the model, then answer line after line."""
    model, tokenizer, num_threads = sys.argv[1:]
    pipeline = genai.LLMPipeline(model, genai.Tokenizer(tokenizer), "CPU", INFERENCE_NUM_THREADS=int(num_threads))
    prompts = np.random.default_rng(0)
    print("ready", flush=True)
    for line in sys.stdin:
        num_prompt, num_new = json.loads(line)
        ids = prompts.integers(1000, 20000, (1, num_prompt))
        wanted = genai.GenerationConfig(max_new_tokens=num_new + 1, ignore_eos=True, do_sample=False)
        found = pipeline.generate(ov.Tensor(ids), wanted).perf_metrics
        print(json.dumps([found.get_ttft().mean / 1000, found.get_tpot().mean / 1000]), flush=True)


if __name__ == "__main__":
    main()
