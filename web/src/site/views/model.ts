/** The model as a tree of modules, with what each holds and costs. As `page/architecture.py`. */
import type { Model, ModelConfig } from "../../engine/types";
import type { ModelView, ModuleNode } from "../../schema";
import { sizeOf } from "../tensor";
import { dtypeOf, runnerOf } from "./text";

const KINDS: Readonly<Record<string, string>> = {
  embed_tokens: "Embedding", layers: "ModuleList", self_attn: "LlamaAttention", mlp: "LlamaMLP",
  input_layernorm: "LlamaRMSNorm", post_attention_layernorm: "LlamaRMSNorm", norm: "LlamaRMSNorm", model: "LlamaModel",
};
const EMBEDDING = "model.embed_tokens.weight";
const OF_LAYER = [
  "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
  "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
] as const;

/** Paths of all modules that have a weight of their own, in the order of the computation. */
function pathsOf({ layers, tied }: ModelConfig): string[] {
  const inLayers = Array.from({ length: layers }, (_, i) => OF_LAYER.map((part) => `model.layers.${i}.${part}`)).flat();
  return ["model.embed_tokens", ...inLayers, "model.norm", ...(tied ? [] : ["lm_head"])];
}

function leafOf(config: ModelConfig, path: string): ModuleNode {
  const [weight, bias] = [config.weights[`${path}.weight`], config.weights[`${path}.bias`]];
  const shape = [...(weight?.shape ?? [])];
  const name = path.split(".").at(-1) as string;
  const multiplies = shape.length === 2 && path !== "model.embed_tokens";
  return {
    name, path, kind: KINDS[name] ?? "Linear", shape, parameters: sizeOf(shape) + (bias ? sizeOf(bias.shape) : 0),
    num_bytes: (weight?.bytes ?? 0) + (bias?.bytes ?? 0), type: weight?.type ?? null, tied_to: null, flops: multiplies ? 2 * sizeOf(shape) : 0, children: [],
  };
}

function tiedHead({ vocab, hidden }: ModelConfig): ModuleNode {
  return {
    name: "lm_head", path: "lm_head", kind: "Linear", shape: [vocab, hidden], parameters: 0, num_bytes: 0, type: null,
    tied_to: EMBEDDING, flops: 2 * vocab * hidden, children: [],
  };
}

/** The module of a path, with those that it holds. */
function nodeOf(path: string, leaves: readonly ModuleNode[]): ModuleNode {
  const leaf = leaves.find((one) => one.path === path);
  if (leaf) return leaf;
  const prefix = path ? `${path}.` : "";
  const names = new Set(leaves.filter((one) => one.path.startsWith(prefix)).map((one) => one.path.slice(prefix.length).split(".")[0] as string));
  const children = [...names].map((name) => nodeOf(prefix + name, leaves.filter((one) => one.path.startsWith(prefix + name))));
  const sum = (field: "parameters" | "num_bytes" | "flops"): number => children.reduce((all, child) => all + child[field], 0);
  const name = path.split(".").at(-1) as string;
  const kind = path === "" ? "LlamaForCausalLM" : /^\d+$/.test(name) ? "LlamaDecoderLayer" : (KINDS[name] as string);
  return { name, path, kind, shape: [], parameters: sum("parameters"), num_bytes: sum("num_bytes"), type: null, tied_to: null, flops: sum("flops"), children };
}

export function treeOf(config: ModelConfig): ModuleNode {
  const leaves = pathsOf(config).map((path) => leafOf(config, path));
  return nodeOf("", config.tied ? [...leaves, tiedHead(config)] : leaves);
}

/** What a token's key and value occupy in the cache. */
export const kvBytes = ({ layers, kvHeads, headDim, kvDtype }: ModelConfig): number => 2 * layers * kvHeads * headDim * (kvDtype === "float32" ? 4 : 2);

export function describe(model: Model, isScaled: boolean, hasLesson: boolean): ModelView {
  const { config } = model;
  const tree = treeOf(config);
  return {
    name: config.name, runner: runnerOf(model), dtype: dtypeOf(model), input_bits: dtypeOf(model) === "float32" ? null : config.inputBits, context: config.context, window: config.window,
    shape: { D: config.hidden, N: config.heads, K: config.kvHeads, H: config.headDim, F: config.intermediate, V: config.vocab, L: config.layers },
    rms_norm_eps: config.normEps, rope_scaling: isScaled ? { rope_type: "scaled" } : null, tied: config.tied, tree,
    attention_flops_per_position: 4 * config.layers * config.heads * config.headDim, kv_bytes_per_token: kvBytes(config),
    num_bytes: tree.num_bytes, adds_bos: model.encode("").ids.length > 0, adapters: [], loaded_with: {}, has_lesson: hasLesson,
  };
}
