/* Made from schema.json by `npm run schema`; do not edit. */

export interface Schema {
  [k: string]: unknown;
}
/**
 * Something that was added to the stream.
 *
 * Attributes:
 *     part: What added it.
 *     layer: Of which layer; None for the embedding.
 *     head: Which head; None but for heads.
 *     norm: The length of what was added.
 *     logit: What it gives to the logit.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "AdditionView".
 */
export interface AdditionView {
  head: number | null;
  layer: number | null;
  logit: number;
  norm: number;
  part: "embed" | "attention" | "head" | "mlp";
}
/**
 * Some of the tools, and whether one has to be called.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "AllowedTools".
 */
export interface AllowedTools {
  mode: "auto" | "required";
  /**
   * @minItems 1
   */
  tools: [NamedTool, ...NamedTool[]];
}
/**
 * A tool, by its name.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NamedTool".
 */
export interface NamedTool {
  function: Name;
  type: "function";
}
/**
 * A function, by its name.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "Name".
 */
export interface Name {
  name: string;
}
/**
 * Where a logit comes from.
 *
 * Attributes:
 *     position: After which token it is asked for.
 *     target_id: The token.
 *     against_id: Where given, all numbers are of the target's logit less this token's.
 *     logit: What the pass has computed.
 *     scale: What the final norm of that pass multiplies the stream with.
 *     additions: The embedding, then attention and MLP of each layer: they sum to the logit, but for `rounding`.
 *     heads: The heads of each layer, which sum to its attention.
 *     rounding: The logit less the sum.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "AttributionView".
 */
export interface AttributionView {
  additions: AdditionView[];
  against_id: number | null;
  heads: AdditionView[];
  logit: number;
  position: number;
  rounding: number;
  scale: number;
  target_id: number;
}
/**
 * Blocks of the cache that lie side by side, with as many owners each.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "BlockRunView".
 */
export interface BlockRunView {
  count: number;
  first: number;
  owners: number;
}
/**
 * What was called.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "CalledFunction".
 */
export interface CalledFunction {
  arguments: string;
  name: string;
  parsed_arguments?: {
    [k: string]: unknown;
  };
}
/**
 * A token that may come next: its logit, and what the softmax of all logits makes of it.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "CandidateView".
 */
export interface CandidateView {
  logit: number;
  logprob: number;
  probability: number;
  text: string;
  token_id: number;
}
/**
 * One tool that has to be called, or the choice between some.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ChosenTools".
 */
export interface ChosenTools {
  allowed_tools?: AllowedTools | null;
  function?: Name | null;
  type: "function" | "allowed_tools";
}
/**
 * What is thought of the token that was asked about; rank 1 is the most probable.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ChosenView".
 */
export interface ChosenView {
  logprob: number;
  probability: number;
  rank: number;
}
/**
 * Weights of one row of a Linear in a type of few bits.
 *
 * Attributes:
 *     module: The Linear, by its name in the model.
 *     num_rows: Its outputs.
 *     num_columns: Its inputs, the weights of a row.
 *     start: The first weight that is told.
 *     weights: They, one after the other.
 *     type_name: The type.
 *     meaning: What a weight is: q is its code, d and m are the block's scale and minimum.
 *     block_size: Weights in a block of the type.
 *     bits_per_weight: With the share of the scales.
 *     is_stored: The codes are those that the model has; otherwise what it would have.
 *     stored_type: What the model has.
 *     levels: What each code stands for.
 *     level_counts: How many weights of the whole row have each code.
 *     row_error: Length of the row's error over the row's length; None where the original is not there.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "CodesView".
 */
export interface CodesView {
  bits_per_weight: number;
  block_size: number;
  is_stored: boolean;
  level_counts: number[];
  levels: number[];
  meaning: string;
  module: string;
  num_columns: number;
  num_rows: number;
  row_error: number | null;
  start: number;
  stored_type: string;
  type_name: string;
  weights: WeightView[];
}
/**
 * One weight.
 *
 * Attributes:
 *     code: What is stored of it alone.
 *     level: What the code stands for, before the scale.
 *     scale: What the level is multiplied with; shared with neighbours.
 *     minimum: What is added then; None where the type has none.
 *     value: What the weight means.
 *     original: What it was before, or None where that is not there.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "WeightView".
 */
export interface WeightView {
  code: number;
  level: number;
  minimum: number | null;
  original: number | null;
  scale: number;
  value: number;
}
/**
 * How far the streams are from each other after a layer.
 *
 * Attributes:
 *     layer: The layer.
 *     relative: For each token the length of the difference over the length of the other's stream.
 *     cosine: For each token that of the angle between the two.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ComparedLayerView".
 */
export interface ComparedLayerView {
  cosine: number[];
  layer: number;
  relative: number[];
}
/**
 * What becomes of the predictions at a token.
 *
 * Attributes:
 *     position: Where it stands.
 *     token_id: The token.
 *     kl: KL(against || side) of what comes after it, nats.
 *     surprise: -log P of the token itself, nats; None for the first.
 *     surprise_against: The same by the other side.
 *     candidates: The most probable tokens after it, the best first.
 *     candidates_against: The same by the other side.
 *     same_top: Whether both think the same token most probable.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ComparedTokenView".
 */
export interface ComparedTokenView {
  candidates: LikelyView[];
  candidates_against: LikelyView[];
  kl: number;
  position: number;
  same_top: boolean;
  surprise: number | null;
  surprise_against: number | null;
  token_id: number;
}
/**
 * A token that may come next, and how probable it is thought to be.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LikelyView".
 */
export interface LikelyView {
  logprob: number;
  probability: number;
  text: string;
  token_id: number;
}
/**
 * Two sides over one text.
 *
 * Attributes:
 *     side: What is looked at.
 *     against: What it is measured against.
 *     layers: By layer and token.
 *     tokens: By token.
 *     kl: The mean of the tokens'.
 *     same_top: The share of the tokens after which both think the same one most probable.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ComparisonView".
 */
export interface ComparisonView {
  against: SideView;
  kl: number;
  layers: ComparedLayerView[];
  same_top: number;
  side: SideView;
  tokens: ComparedTokenView[];
}
/**
 * Something that can be compared.
 *
 * Attributes:
 *     id: What a request calls it.
 *     title: What it is called.
 *     words: What it is, and what a comparison with it means.
 *     num_bytes: What it takes beside the model while it is there; 0 for what is over the same weights.
 *     seconds: What building it took; None where that has not been done.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SideView".
 */
export interface SideView {
  id: string;
  num_bytes: number;
  seconds: number | null;
  title: string;
  words: string;
}
/**
 * What a pass's last token costs, by shapes and measured; as `llamarium.inspect.probes.cost` has it.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "CostView".
 */
export interface CostView {
  cache_bytes_per_token: number;
  flops: number;
  flops_without: number;
  largest_difference: number;
  num_rounds: number;
  num_tokens: number;
  seconds: number;
  seconds_without: number;
}
/**
 * The score at each distance: q·k / √H of the same two vectors, turned by their positions.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "DistancesView".
 */
export interface DistancesView {
  distances: number[];
  scores: number[];
}
/**
 * A token in the draw: the largest total wins.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "DrawnView".
 */
export interface DrawnView {
  noise: number;
  text: string;
  token_id: number;
  total: number;
}
/**
 * What a part of the model computes, times `factor`; as `inspect.interventions.edits.Edit`.
 *
 * Attributes:
 *     part: The embedding's rows; what attention, one head or the MLP of a layer computes; the stream after a layer.
 *     layer: Its layer; none for "embed".
 *     head: Which head, for "head".
 *     positions: At which tokens; all where left out.
 *     factor: 0 takes it away, 1 leaves it as it is.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "EditFields".
 */
export interface EditFields {
  factor?: number;
  head?: number | null;
  layer?: number | null;
  part: "embed" | "attention" | "head" | "mlp" | "residual";
  positions?: [number, ...number[]] | null;
}
/**
 * `POST /inspect/passes/{id}/edited`: the same text with edits of the model, beside it without them.
 *
 * Attributes:
 *     edits: In order.
 *     steering: One more edit, after them.
 *     position: After which token is asked; the last where left out.
 *     token_id: A token that is told of, whatever its rank.
 *     k: How many of the most probable next tokens of each are told.
 *     max_tokens: How far both go on greedily after that token.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "EditedRequest".
 */
export interface EditedRequest {
  /**
   * @maxItems 64
   */
  edits?: EditFields[];
  k?: number;
  max_tokens?: number;
  position?: number | null;
  steering?: SteeringFields | null;
  token_id?: number | null;
}
/**
 * The difference of two prompts, at their last tokens, added to the stream after a layer.
 *
 * Attributes:
 *     toward: The prompt to whose stream is steered.
 *     away: The prompt whose stream is taken away.
 *     layer: After which layer.
 *     strength: How much of the difference is added.
 *     positions: At which tokens; all where left out.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SteeringFields".
 */
export interface SteeringFields {
  away: string;
  layer: number;
  positions?: [number, ...number[]] | null;
  strength?: number;
  toward: string;
}
/**
 * A text's next token without edits and with them; both on the modules.
 *
 * Attributes:
 *     position: After which token was asked.
 *     runner: What computed both: the modules.
 *     divergence: KL(without ‖ with) of the next token, in nats.
 *     tokens: The most probable of either, and the one that was asked about; by their probability without.
 *     answer_before: How it goes on without.
 *     answer_after: How it goes on with them.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "EditedView".
 */
export interface EditedView {
  answer_after: TokenView[];
  answer_before: TokenView[];
  divergence: number;
  position: number;
  runner: string;
  tokens: TokenEffectView[];
}
/**
 * A token.
 *
 * Attributes:
 *     id: Its row of the embedding table.
 *     text: Printable; what is no character is escaped.
 *     bytes: What it stands for.
 *     is_special: It is a control token, which no text becomes.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TokenView".
 */
export interface TokenView {
  bytes: number[];
  id: number;
  is_special: boolean;
  text: string;
}
/**
 * A next token: what is thought of it without the edits, and with them.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TokenEffectView".
 */
export interface TokenEffectView {
  after: ChosenView;
  before: ChosenView;
  text: string;
  token_id: number;
}
/**
 * The last event of a stream that came to its end.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "EndView".
 */
export interface EndView {
  type?: "end";
}
/**
 * The errors of one way to run the text.
 *
 * Attributes:
 *     what: The pass itself; or in float32 with the weights quantized; or with the inputs rounded, too.
 *     layers: All layers.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ErrorsOfView".
 */
export interface ErrorsOfView {
  layers: LayerErrorView[];
  what: "pass" | "weights" | "weights and inputs";
}
/**
 * How far the stream after a layer is away.
 *
 * Attributes:
 *     layer: The layer.
 *     relative: For each token the length of the difference over the length of the stream in float32.
 *     cosine: For each token that of the angle between the two.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LayerErrorView".
 */
export interface LayerErrorView {
  cosine: number[];
  layer: number;
  relative: number[];
}
/**
 * How far passes are from the one of the same weights in float32.
 *
 * Attributes:
 *     quantize: The type of the weights, where one was asked for.
 *     runs: The pass itself, and where a type was asked for what that does.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ErrorsView".
 */
export interface ErrorsView {
  quantize: ("NF4" | "Q8_0" | "Q4_1") | null;
  runs: ErrorsOfView[];
}
/**
 * What a pass does otherwise than the model was trained to; as `inspect.interventions.experiments.Experiment`.
 *
 * Attributes:
 *     bidirectional: Every token sees the whole text.
 *     hidden: Positions that no other token sees.
 *     rotation: Whether queries and keys are turned.
 *     rope_scaling: "off" leaves RoPE's scaling out.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ExperimentFields".
 */
export interface ExperimentFields {
  bidirectional?: boolean;
  /**
   * @maxItems 64
   */
  hidden?: number[];
  rope_scaling?: "model" | "off";
  rotation?: boolean;
}
/**
 * A function that the model may call.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "Function".
 */
export interface Function {
  description?: string | null;
  name: string;
  parameters?: {
    [k: string]: unknown;
  } | null;
  strict?: boolean | null;
}
/**
 * What each head of a layer adds to a token's stream through its columns of o_proj.
 *
 * Attributes:
 *     layer: The layer.
 *     position: The token.
 *     norms: The length of what each head adds.
 *     shares: How much of attention's output lies along it; they sum to one.
 *     rounding: The length of what attention's output differs by from the sum of these.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "HeadsView".
 */
export interface HeadsView {
  layer: number;
  norms: number[];
  position: number;
  rounding: number;
  shares: number[];
}
/**
 * One input: `value` is code · scale.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "InputView".
 */
export interface InputView {
  code: number;
  original: number;
  scale: number;
  value: number;
}
/**
 * Inputs as the C kernels round them.
 *
 * Attributes:
 *     position: The token.
 *     num_inputs: How many the Linear has.
 *     start: The first that is told.
 *     inputs: They.
 *     num_wide: How many of all have a code of more than 8 bits: those beside the largest of their 32.
 *     error: Length of the error of all over their length.
 *     is_rounded: The pass has rounded them so; otherwise its weights are not packed, and nothing is rounded.
 *     input_bits: 8, or 16 where what 8 bits leave is rounded once more and multiplied too; None where nothing is.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "InputsView".
 */
export interface InputsView {
  error: number;
  input_bits: number | null;
  inputs: InputView[];
  is_rounded: boolean;
  num_inputs: number;
  num_wide: number;
  position: number;
  start: number;
}
/**
 * A schema, with what clients call it. It is held strictly, whatever `strict` says.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "JsonSchema".
 */
export interface JsonSchema {
  description?: string | null;
  name: string;
  schema?: {
    [k: string]: unknown;
  } | null;
  strict?: boolean | null;
}
/**
 * A token of the text, once: the length of the gradient on its row, and how far the step has moved the row.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LearnedRowView".
 */
export interface LearnedRowView {
  gradient: number;
  moved: number | null;
  text: string;
  token_id: number;
}
/**
 * A token of the text but the first, and -log P of it; None where that is no finite number any more.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LearnedTokenView".
 */
export interface LearnedTokenView {
  loss: number;
  loss_after: number | null;
  position: number;
}
/**
 * What the stream would say at one place: the most probable next token, and of the one that was asked about.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LensCellView".
 */
export interface LensCellView {
  best: LikelyView;
  chosen: ChosenView | null;
}
/**
 * A row for each layer, a cell for each token from `start` on.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LensGridView".
 */
export interface LensGridView {
  after: "attention" | "mlp";
  rows: LensCellView[][];
  start: number;
  token_id: number | null;
}
/**
 * What the stream would say after one half of a layer.
 *
 * Attributes:
 *     layer: The layer.
 *     after: Which half of it has been added.
 *     candidates: The most probable next tokens, the best first.
 *     chosen: Of the token that was asked about; None if none was.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LensPlaceView".
 */
export interface LensPlaceView {
  after: "attention" | "mlp";
  candidates: LikelyView[];
  chosen: ChosenView | null;
  layer: number;
}
/**
 * What the stream would say at each place, in the order of computation.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LensView".
 */
export interface LensView {
  places: LensPlaceView[];
  position: number;
  token_id: number | null;
}
/**
 * `POST /inspect/passes/{id}/lesson`: one step of training on the pass's text, on a copy of the model.
 *
 * Attributes:
 *     optimizer: torch's, with its defaults but for the rate and no weight decay.
 *     learning_rate: Its rate.
 *     k: How many of the most probable next tokens are told.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LessonRequest".
 */
export interface LessonRequest {
  k?: number;
  learning_rate?: number;
  optimizer?: "SGD" | "AdamW";
}
/**
 * What one step of training on a text has done to a copy of the model.
 *
 * Attributes:
 *     optimizer: Whose step.
 *     learning_rate: Its rate.
 *     tokens: The losses.
 *     rows: Of the embedding table.
 *     gradient_norm: The length of the whole gradient.
 *     before: The most probable tokens to follow the text, as the copy was.
 *     after: The same after the step; none where the step was so large that nothing is finite any more.
 *     num_unpacked: How many modules had packed weights, which were unpacked in the copy: packed ones cannot learn.
 *     num_bytes: What the step held, about.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "LessonView".
 */
export interface LessonView {
  after: LikelyView[];
  before: LikelyView[];
  gradient_norm: number;
  learning_rate: number;
  num_bytes: number;
  num_unpacked: number;
  optimizer: "SGD" | "AdamW";
  rows: LearnedRowView[];
  tokens: LearnedTokenView[];
}
/**
 * What a pass says of the token: its logit, less that of the one it is held against, and its probability.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "MeasuredView".
 */
export interface MeasuredView {
  logit: number;
  probability: number;
}
/**
 * Two neighbours became one part; `start` is where, in bytes of the piece.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "MergeView".
 */
export interface MergeView {
  left: Part;
  rank: number;
  result: Part;
  right: Part;
  start: number;
}
/**
 * Some bytes.
 *
 * Attributes:
 *     text: Printable; what is no character is escaped.
 *     bytes: They themselves.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "Part".
 */
export interface Part {
  bytes: number[];
  text: string;
}
/**
 * A message of a dialog.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "Message".
 */
export interface Message {
  annotations?: [] | null;
  content?: string | TextPart[] | null;
  parsed?: {
    [k: string]: unknown;
  };
  provider_specific_fields?: {
    [k: string]: null;
  } | null;
  role: "system" | "developer" | "user" | "assistant" | "tool";
  tool_call_id?: string | null;
  tool_calls?: [ToolCall, ...ToolCall[]] | null;
}
/**
 * A part of a message.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TextPart".
 */
export interface TextPart {
  text: string;
  type: "text";
}
/**
 * A call that the assistant has made.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ToolCall".
 */
export interface ToolCall {
  function: CalledFunction;
  id: string;
  type: "function";
}
/**
 * A model, or a shape.
 *
 * Attributes:
 *     name: Its name.
 *     is_loaded: It is the model at hand, and no shape alone.
 *     runner: What computes; None for a shape.
 *     dtype: What it computes in; None for a shape.
 *     shape: Its sizes.
 *     context: Tokens that it was made for.
 *     rms_norm_eps: What RMSNorm adds to the mean square.
 *     rope_theta: The base of RoPE's frequencies.
 *     rope_scaling: Llama 3's scaling, or None.
 *     tied: Whether the head's weight is the embedding table.
 *     tree: Its modules.
 *     flops_per_token: For one token that sees itself only.
 *     attention_flops_per_position: More for each earlier token that it sees.
 *     kv_bytes_per_token: What its key and value occupy in the cache.
 *     num_bytes: What the weights occupy.
 *     adds_bos: Whether its tokenizer puts a token before every text; None for a shape.
 *     adapters: Names that a pass may choose.
 *     loaded_with: Arguments of `llamarium.load` besides the name, as the server was started with.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ModelView".
 */
export interface ModelView {
  adapters: string[];
  adds_bos: boolean | null;
  attention_flops_per_position: number;
  context: number;
  dtype: string | null;
  flops_per_token: number;
  is_loaded: boolean;
  kv_bytes_per_token: number;
  loaded_with: {
    [k: string]: string | number | boolean;
  };
  name: string;
  num_bytes: number;
  rms_norm_eps: number;
  rope_scaling: {
    [k: string]: number;
  } | null;
  rope_theta: number;
  runner: string | null;
  shape: Shape;
  tied: boolean;
  tree: ModuleNode;
}
/**
 * The sizes of a model, under the letters of the project's legend.
 *
 * Attributes:
 *     D: hidden_size.
 *     N: Query heads.
 *     K: Key-value heads.
 *     H: head_dim.
 *     F: intermediate_size.
 *     V: vocab_size.
 *     L: Layers.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "Shape".
 */
export interface Shape {
  D: number;
  F: number;
  H: number;
  K: number;
  L: number;
  N: number;
  V: number;
}
/**
 * A module of the model.
 *
 * Attributes:
 *     name: Its name in its parent, as in `q_proj`.
 *     path: Its whole name, as in `model.layers.0.self_attn.q_proj`.
 *     kind: Its class.
 *     shape: Of its weight; empty where it has none of its own.
 *     parameters: Of it and all that it holds; a tied head has none.
 *     num_bytes: That they occupy; 2 a parameter where nothing was loaded.
 *     type: What its weight is in memory, as in BF16 or Q4_1; None where it has none.
 *     tied_to: The weight that is its own too.
 *     flops: Of its products for one token, of it and all that it holds; a multiply and an add are two.
 *     children: The modules in it.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ModuleNode".
 */
export interface ModuleNode {
  children: ModuleNode[];
  flops: number;
  kind: string;
  name: string;
  num_bytes: number;
  parameters: number;
  path: string;
  shape: number[];
  tied_to: string | null;
  type: string | null;
}
/**
 * What a checkpoint makes of a text.
 *
 * Attributes:
 *     run: The training run.
 *     step: The checkpoint's.
 *     surprises: -log P of each token, nats; None for the first.
 *     loss: The mean of those; None for a text of one token.
 *     best: The most probable token after the text's last.
 *     seconds: What loading the checkpoint took.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "MomentView".
 */
export interface MomentView {
  best: LikelyView;
  loss: number | null;
  run: string;
  seconds: number | null;
  step: number;
  surprises: (number | null)[];
}
/**
 * A row that points nearly the same way.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NeighborView".
 */
export interface NeighborView {
  cosine: number;
  text: string;
  token_id: number;
}
/**
 * `POST /inspect/neighbors`: the rows nearest to word - minus + plus; a word, or a token's id.
 *
 * Attributes:
 *     random_seed: Among the rows that initialisation draws from this seed, in place of the learned ones.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NeighborsRequest".
 */
export interface NeighborsRequest {
  k?: number;
  /**
   * @maxItems 32
   */
  minus?: (string | number)[];
  /**
   * @maxItems 32
   */
  plus?: (string | number)[];
  random_seed?: number | null;
  word: string | number;
}
/**
 * The nearest rows, the nearest first.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NeighborsView".
 */
export interface NeighborsView {
  neighbors: NeighborView[];
  query: QueryWordView[];
}
/**
 * A word of the question, and the token that stands for it.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "QueryWordView".
 */
export interface QueryWordView {
  sign: "+" | "-";
  text: string;
  token_id: number;
  word: string;
}
/**
 * What one neuron computes for a token.
 *
 * Attributes:
 *     index: Its number, below F.
 *     gate: Of the gate projection.
 *     act: silu(gate).
 *     up: Of the up projection.
 *     gated: act · up, what its column of the down projection is multiplied with.
 *     by_token: The same for every `stride`-th token of the text, from the first on.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NeuronView".
 */
export interface NeuronView {
  act: number;
  by_token: number[];
  gate: number;
  gated: number;
  index: number;
  up: number;
}
/**
 * The neurons of one layer by the size of their product, the largest first.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NeuronsView".
 */
export interface NeuronsView {
  layer: number;
  neurons: NeuronView[];
  position: number;
}
/**
 * The most probable tokens after a position, the best first.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "NextView".
 */
export interface NextView {
  candidates: CandidateView[];
  position: number;
}
/**
 * One answer as of the moment when it was opened, computed again.
 *
 * Attributes:
 *     request: What it was doing.
 *     params: What it asks of the sampler.
 *     run: The pass over its tokens so far.
 *     start: Where the answer begins.
 *     sampler: How its next token is chosen; None where a vector is wanted.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "OpenedView".
 */
export interface OpenedView {
  params: ParametersView;
  request: RequestView;
  run: PassView;
  sampler: SamplerView | null;
  start: number;
}
/**
 * What a request asks of the sampler; the seed as text, since it may have more digits than a browser's numbers.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ParametersView".
 */
export interface ParametersView {
  frequency_penalty: number;
  has_form: boolean;
  has_logit_bias: boolean;
  max_tokens: number;
  min_p: number;
  presence_penalty: number;
  repetition_penalty: number;
  seed: string;
  temperature: number;
  top_k: number;
  top_p: number;
}
/**
 * One answer in the making.
 *
 * Attributes:
 *     number: Of its request, by arrival.
 *     row: Which of the request's answers.
 *     stage: "waiting" has no blocks, "prefill" reads the prompt, "decode" gets a token in every step.
 *     adapter: The name of the one that answers, or None.
 *     is_embedding: The prompt's vector is wanted, and no token.
 *     num_prompt: Tokens of the prompt.
 *     num_tokens: Those, and the answer's so far.
 *     limit: At how many tokens it ends at the latest.
 *     num_run: Tokens whose keys and values are in the cache.
 *     num_cached: Tokens of the prompt that were there when it began.
 *     num_blocks: Blocks of the cache that it has.
 *     num_shared: Those of them that others have, too.
 *     blocks: The first of them, in the order of positions.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RequestView".
 */
export interface RequestView {
  adapter: string | null;
  blocks: BlockRunView[];
  is_embedding: boolean;
  limit: number;
  num_blocks: number;
  num_cached: number;
  num_prompt: number;
  num_run: number;
  num_shared: number;
  num_tokens: number;
  number: number;
  row: number;
  stage: "waiting" | "prefill" | "decode";
}
/**
 * A pass over one text: known by its ids, adapter and experiment, so that asking twice gives the same.
 *
 * Attributes:
 *     id: Names it.
 *     tokens: What was run.
 *     adapter: Which one was on the model.
 *     experiment: What was otherwise, if anything was.
 *     runner: What computes.
 *     dtype: In what.
 *     kv_dtype: What it keeps keys and values in.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PassView".
 */
export interface PassView {
  adapter: string | null;
  dtype: string;
  experiment: ExperimentFields | null;
  id: string;
  kv_dtype: string;
  runner: string;
  tokens: TokenView[];
}
/**
 * How the token after a position is chosen; without a draw at temperature 0.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SamplerView".
 */
export interface SamplerView {
  draw: DrawnView[] | null;
  place: number;
  position: number;
  seed: number;
  steps: SamplerStepView[];
  text: string;
  token_id: number;
}
/**
 * What one step leaves, the most probable first.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SamplerStepView".
 */
export interface SamplerStepView {
  candidates: SamplerCandidateView[];
  is_on: boolean;
  name: string;
  num_left: number;
}
/**
 * A token that a step has left.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SamplerCandidateView".
 */
export interface SamplerCandidateView {
  logit: number;
  probability: number;
  text: string;
  token_id: number;
}
/**
 * `POST /inspect/passes`: a text, its ids, or a dialog; one of them.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PassRequest".
 */
export interface PassRequest {
  adapter?: string | null;
  add_special_tokens?: boolean | null;
  experiment?: ExperimentFields | null;
  ids?: [number, ...number[]] | null;
  messages?: [Message, ...Message[]] | null;
  text?: string | null;
}
/**
 * The first event of a grid.
 *
 * Attributes:
 *     type: "begin".
 *     base: What the pass says itself.
 *     source: What the second prompt's says.
 *     layers: The rows, in the order in which they come.
 *     positions: The columns.
 *     total: Cells in all.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PatchBeginView".
 */
export interface PatchBeginView {
  base: MeasuredView;
  layers: number[];
  positions: number[];
  source: MeasuredView;
  total: number;
  type?: "begin";
}
/**
 * The pass with one place of it from the second prompt.
 *
 * Attributes:
 *     layer: Which layer.
 *     position: Which token.
 *     logit: As `MeasuredView` has it.
 *     probability: As well.
 *     recovered: Of the way from the pass's logit to the second prompt's; None where both are equal.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PatchCellView".
 */
export interface PatchCellView {
  layer: number;
  logit: number;
  position: number;
  probability: number;
  recovered: number | null;
}
/**
 * Some cells, and how many have come by now.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PatchCellsView".
 */
export interface PatchCellsView {
  cells: PatchCellView[];
  done: number;
  type?: "cells";
}
/**
 * `POST /inspect/passes/{id}/patches`: what a second prompt has computed, put into this pass, place by place.
 *
 * Attributes:
 *     source_ids: The second prompt; as many tokens.
 *     token_id: The token that is asked about, after the last one.
 *     against_id: Take this token's logit away.
 *     part: What is put in: the stream after a layer, or what its attention, or its MLP, adds.
 *     layers: Rows of the grid; all where left out.
 *     positions: Columns; all where left out.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PatchRequest".
 */
export interface PatchRequest {
  against_id?: number | null;
  layers?: [number, ...number[]] | null;
  part?: "residual" | "attention" | "mlp";
  positions?: [number, ...number[]] | null;
  /**
   * @minItems 1
   */
  source_ids: [number, ...number[]];
  token_id: number;
}
/**
 * A cut of the text; `start` is where it begins, in bytes of the text.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "PieceView".
 */
export interface PieceView {
  ids: number[];
  merges: MergeView[];
  start: number;
  text: string;
}
/**
 * What a server's engine was doing between two steps.
 *
 * Attributes:
 *     at_s: When, in seconds of the server's own clock.
 *     num_running: Answers that have blocks.
 *     num_waiting: Answers that wait.
 *     num_blocks: Of the cache.
 *     num_used_blocks: Those that answers have.
 *     block_size: Tokens of a block.
 *     generated_tokens: Chosen since the server began.
 *     requests: The answers, by arrival; the first ones alone where there are too many.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RequestsView".
 */
export interface RequestsView {
  at_s: number;
  block_size: number;
  generated_tokens: number;
  num_blocks: number;
  num_running: number;
  num_used_blocks: number;
  num_waiting: number;
  requests: RequestView[];
}
/**
 * OpenAI's: any text, any JSON object, or what a schema allows.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ResponseFormat".
 */
export interface ResponseFormat {
  json_schema?: JsonSchema | null;
  type: "text" | "json_object" | "json_schema";
}
/**
 * One pair of features: i and i + H/2.
 *
 * Attributes:
 *     index: i.
 *     frequency: Radians a position, with the model's scaling.
 *     unscaled: The same without.
 *     wavelength: Positions of one whole turn.
 *     angle: At the position asked about, in radians.
 *     turns: Whole turns over the context.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RopePairView".
 */
export interface RopePairView {
  angle: number;
  frequency: number;
  index: number;
  turns: number;
  unscaled: number;
  wavelength: number;
}
/**
 * Every pair's frequency, and its angle at a position.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RopeView".
 */
export interface RopeView {
  context: number;
  is_scaled: boolean;
  pairs: RopePairView[];
  position: number;
}
/**
 * Rows of the embedding table over a run, all seen from one side.
 *
 * Attributes:
 *     steps: The checkpoints.
 *     ids: The rows.
 *     places: For each step and row, where it stands on the first two principal components of the last checkpoint's.
 *     share: Of the last one's variance that these show.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RunRowsView".
 */
export interface RunRowsView {
  ids: number[];
  places: number[][][];
  share: number;
  steps: number[];
}
/**
 * A training run that the server was started with.
 *
 * Attributes:
 *     name: Its folder's.
 *     steps: Of its checkpoints; of more than 60, so many spread over them.
 *     num_bytes: What the last one's weights occupy.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RunView".
 */
export interface RunView {
  name: string;
  num_bytes: number;
  steps: number[];
}
/**
 * The runs whose checkpoints can be looked at, and the most tokens of a text that they read.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "RunsView".
 */
export interface RunsView {
  max_tokens: number;
  runs: RunView[];
}
/**
 * `POST /inspect/passes/{id}/sampler`: parameters as for an answer, which has the ranges and meanings.
 *
 * Attributes:
 *     position: The token after which one is chosen; the last where left out.
 *     start: Where the answer begins: what stands before is the prompt. After `position` where left out.
 *     k: Candidates that are told after each step.
 *     response_format: The form of the answer, as chat completions have it.
 *     tools: That it may call, and with them the other two; strict calls have a form.
 *     tool_choice: See above.
 *     parallel_tool_calls: See above.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SamplerRequest".
 */
export interface SamplerRequest {
  frequency_penalty?: number;
  k?: number;
  min_p?: number;
  parallel_tool_calls?: boolean | null;
  position?: number | null;
  presence_penalty?: number;
  repetition_penalty?: number;
  response_format?: ResponseFormat | null;
  seed?: number;
  start?: number | null;
  temperature?: number;
  tool_choice?: ("auto" | "none" | "required") | ChosenTools | null;
  tools?: Tool[] | null;
  top_k?: number;
  top_p?: number;
}
/**
 * A tool.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "Tool".
 */
export interface Tool {
  function: Function;
  type: "function";
}
/**
 * The tokens from a position on.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "ScoreView".
 */
export interface ScoreView {
  tokens: TokenScoreView[];
}
/**
 * One token: log P after those before it, and its rank, 1 for the most probable.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TokenScoreView".
 */
export interface TokenScoreView {
  logprob: number;
  position: number;
  rank: number;
  token_id: number;
}
/**
 * What can be compared.
 *
 * Attributes:
 *     sides: The first is the model as it answers.
 *     max_bytes: What one of them may take now: half of the memory that is free, one is there at a time.
 *     max_tokens: Of a text that is compared.
 *     side: What is looked at where nothing is chosen.
 *     against: What that is measured against.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SidesView".
 */
export interface SidesView {
  against: string;
  max_bytes: number;
  max_tokens: number;
  side: string;
  sides: SideView[];
}
/**
 * `POST /inspect/similarity`: the cosine of two rows; `random_seed` as for neighbors.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SimilarityRequest".
 */
export interface SimilarityRequest {
  other: string | number;
  random_seed?: number | null;
  word: string | number;
}
/**
 * Two words, and the cosine of the angle between their rows.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SimilarityView".
 */
export interface SimilarityView {
  cosine: number;
  other: QueryWordView;
  word: QueryWordView;
}
/**
 * The lines that are executed, as they are installed.
 *
 * Attributes:
 *     name: What they are.
 *     file: Where they stand, within the package.
 *     line: The number of the first.
 *     text: All of them.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "SourceView".
 */
export interface SourceView {
  file: string;
  line: number;
  name: string;
  text: string;
}
/**
 * `POST /inspect/ticket`: what stood in the link that was opened.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TicketRequest".
 */
export interface TicketRequest {
  ticket: string;
}
/**
 * The server's key, for this tab.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TicketView".
 */
export interface TicketView {
  key: string;
}
/**
 * `POST /inspect/tokens`: from a text to ids, with every step.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TokensRequest".
 */
export interface TokensRequest {
  add_special_tokens?: boolean;
  text: string;
  tokenizer?: "model" | "llama3";
}
/**
 * How a text became ids.
 *
 * Attributes:
 *     tokenizer: Which one was asked for.
 *     vocab_size: Its ids.
 *     text: The text.
 *     utf8: Its bytes.
 *     pieces: What it was cut into, and what each became; none where `unexplained` says why.
 *     tokens: As the model gets them, BOS included where it was asked for.
 *     unexplained: Why the steps cannot be told, if they cannot.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "TokensView".
 */
export interface TokensView {
  pieces: PieceView[];
  text: string;
  tokenizer: "model" | "llama3";
  tokens: TokenView[];
  unexplained: string | null;
  utf8: number[];
  vocab_size: number;
}
/**
 * `POST /inspect/word`: the token of an id, or the single one of a word: with a space before it first.
 *
 * This interface was referenced by `Schema`'s JSON-Schema
 * via the `definition` "WordRequest".
 */
export interface WordRequest {
  word: string | number;
}
