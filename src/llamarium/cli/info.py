"""Show what a model is and what it costs: its configuration, parameters by
module, bytes by type, FLOPs and KV bytes per token; and where each weight came
from: file, tensor, type, whether its rows were permuted, whether it is tied.

A preset is a published shape without weights: nothing is loaded, and what
follows from the shape is shown, its costs too.

  llamarium info
  llamarium info ./my-model --quantize nf4
  llamarium info llama-3.1-70b
"""

import argparse

from llamarium.cli.options import UsageError, add_json, add_kv_cache, add_loading, add_name, load_llama, named
from llamarium.cli.output import emit_or_show
from llamarium.presets import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_json(parser)
    group = parser.add_argument_group("model")
    add_name(group, "or a preset")
    add_loading(group)
    add_kv_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model, or take a preset, and print its summary."""
    from llamarium.cli.views import summary_view
    from llamarium.hub.builtin import BUILTINS
    from llamarium.inspect.summary import summarize

    args.model = named(args)
    if args.model in PRESETS and args.model not in BUILTINS:
        load_options = (args.dtype, args.device, args.quantize, args.dequantize, args.strict, args.threads)
        if load_options != ("auto", "auto", None, "auto", False, None):
            raise UsageError(f"{args.model} is a preset, of which nothing is loaded; leave out the options of loading")
        summary = summarize(PRESETS[args.model], kv_cache_dtype=args.kv_cache_dtype)
    else:
        llama = load_llama(args)
        why_no_text = llama.why_no_tokenizer if llama.optional_tokenizer is None else ""
        summary = summarize(llama.config, llama.loaded, llama.sources, args.kv_cache_dtype, why_no_text)
    return emit_or_show(args, summary, summary_view)
