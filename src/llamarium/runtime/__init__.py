"""How a model is executed: one `Runner` protocol, one `Batch`, one paged cache, and taps on what is computed.

| file | what it is |
|---|---|
| `batch` | the one description of a step of work, for one stream or hundreds |
| `runner` | the protocol: run a batch over kept keys and values |
| `blocks` | free blocks of a cache, and those of each sequence |
| `taps` | the activations that a pass can hand out |
| `native` | C on a CPU, without torch: the runner, its keys and values, weights, and adapters' low-rank corrections |
| `module_runner` | the modules themselves, on any device: the reference of all others |
| `edits` | whether the modules are still what the runner was made of |
| `loaded_model` | which runner answers: the chosen one, or the modules once they are edited |
| `rope` | RoPE's frequencies without torch |
| `device` | which device a model computes on |
"""
