/** Questions about weights: as few bits, and as they learn. */
import type { CodesView, ErrorsView, InputsView, LessonRequest, LessonView, PassView } from "../schema";
import { api, bulk, get, ofPass, post, query } from "./api";
import type { Numbers } from "./numbers";

export const LINEARS = ["up_proj", "gate_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"] as const;
export const TYPES = ["NF4", "Q4_1", "Q8_0"] as const;

export type LinearName = (typeof LINEARS)[number];
export type TypeName = (typeof TYPES)[number];

/** Some weights of a row of a Linear, or the inputs that meet them. */
export interface Window {
  layer: number;
  linear: LinearName;
  start: number;
  count: number;
}

export const weights = {
  /** Rows of a matrix, with the pass's adapter: (count, columns). */
  rows: (pass: PassView, asked: { layer?: number; linear: LinearName | "lm_head"; start: number; count: number }): Promise<Numbers> =>
    ofPass(pass, () => bulk(`/inspect/passes/${pass.id}/matrix${query(asked)}`)),
  codes: (asked: Window & { row: number; quantize?: TypeName | undefined }): Promise<CodesView> =>
    get(`/inspect/codes${query(asked)}`),
  inputs: (pass: PassView, asked: Window & { position: number }): Promise<InputsView> =>
    api.view<InputsView>(pass, "inputs", asked),
  errors: (pass: PassView, quantize: TypeName | undefined): Promise<ErrorsView> =>
    api.view<ErrorsView>(pass, "errors", { quantize }),
  lesson: (pass: PassView, body: LessonRequest): Promise<LessonView> =>
    ofPass(pass, () => post<LessonView>(`/inspect/passes/${pass.id}/lesson`, body)),
};

/** Where a Linear stands in the model. */
export function pathOf(layer: number, linear: LinearName): string {
  const part = ["q_proj", "k_proj", "v_proj", "o_proj"].includes(linear) ? "self_attn" : "mlp";
  return `model.layers.${layer}.${part}.${linear}`;
}
