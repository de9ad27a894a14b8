/** Logits to a token: the probabilities of the model, and what the sampler leaves of them. */

import { count, number, percent, visible } from "../../lib/format";
import type { SamplerSteps } from "../../schema";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { LogitsNumbers } from "../data/near";
import { productPart } from "../places/sheet";
import { lengthOf, lengthText, productPlace, tokenAt } from "./shared";

const MOST = { wide: 10, narrow: 8 };
const [FOOT, HEAD] = [0.36, 0.93];
const STEP_NAMES: Readonly<Record<string, string>> = { top_k: "top-k", top_p: "top-p", min_p: "min-p" };

const nameOf = (step: string): string => STEP_NAMES[step] ?? step.replaceAll("_", " ");

/** The first step of the sampler that leaves a token out; undefined where none is known to: an answer has the most probable ones of each step. */
export function cutBy(sampled: SamplerSteps, id: number): string | undefined {
  return sampled.steps.find((step) => step.candidates.length >= step.num_left && !step.candidates.some((one) => one.token_id === id))?.name;
}

export function logits(leaf: Leaf, numbers: LogitsNumbers, data: Data): void {
  const { input, candidates, sampled, pos } = numbers;
  const { V, D } = data.shape;
  leaf.row("input", [0.02, 0.12], input, { label: "final norm", value: lengthText(input), says: lengthOf(`final norm of ${tokenAt(data, pos)}`, input), cell: (_, i) => ({ name: `final norm[${i}]` }) });
  const part = productPart("lm_head");
  leaf.arrow("in", [0.5, 0.125], [0.5, part.v0]);
  leaf.matrix("head", part, "lm_head", `${V} × ${D}`, { ...productPlace("lm_head", numbers, data), row: candidates[0]?.token_id ?? 0 });
  const shown = candidates.slice(0, leaf.isNarrow ? MOST.narrow : MOST.wide);
  const step = (HEAD - FOOT) / shown.length;
  const [middle, end] = leaf.isNarrow ? [0.24, 0.6] : [0.2, 0.58];
  const last = sampled?.steps.at(-1)?.candidates ?? [];
  const left = sampled?.steps.at(-1)?.num_left ?? 0;
  leaf.text("model", [middle, HEAD], "the model", { shift: [0, -11] });
  if (sampled) leaf.text("sampler", [end, HEAD], leaf.isNarrow ? `${count(left)} left` : `what the sampler leaves: ${count(left)} of ${count(V)}`, { shift: [0, -11], most: (1 - end) * leaf.size.width });
  const most = Math.max(...shown.map((one) => one.probability), ...last.map((one) => one.probability), 1e-9);
  for (const [i, one] of shown.entries()) {
    const [v1, v0] = [HEAD - i * step, HEAD - (i + 0.72) * step];
    const v = (v0 + v1) / 2;
    const id = one.token_id;
    const isDrawn = sampled?.token_id === id;
    const enter = productPlace("lm_head", numbers, data, id);
    const room = leaf.isNarrow ? 0.2 : 0.25;
    const text = { size: leaf.isNarrow ? "small" : "normal" } as const;
    leaf.text(`c${id}`, [0, v], `${isDrawn ? "▸ " : ""}${visible(one.text)}`, { ...text, mono: true, ink: isDrawn ? "chosen" : "ink", most: (middle - 0.02) * leaf.size.width });
    const bar = (from: number, share: number): number => from + Math.max(leaf.across(2), (room * share) / most);
    const full = bar(middle, one.probability * leaf.done(0, 0.5));
    leaf.box(`c${id}.model`, { u0: middle, u1: full, v0, v1 }, "says", { corner: 2, alpha: sampled ? 0.5 : 1, enter, says: { name: `“${one.text}” next, logit ${number(one.logit)}`, value: one.probability, unit: "probability" } });
    leaf.text(`c${id}.p`, [full, v], percent(one.probability), { ...text, mono: true, shift: [5, 0] });
    if (!sampled) continue;
    const kept = last.find((each) => each.token_id === id);
    const cut = kept ? undefined : cutBy(sampled, id);
    if (kept) {
      const to = bar(end, kept.probability * leaf.done(0.5, 1));
      leaf.box(`c${id}.left`, { u0: end, u1: to, v0, v1 }, isDrawn ? "chosen" : "says", { corner: 2, says: { name: `“${one.text}” after the sampler's steps${isDrawn ? ", and it was drawn" : ""}`, value: kept.probability, unit: "probability" } });
      leaf.text(`c${id}.left.p`, [to, v], percent(kept.probability), { ...text, mono: true, ink: "ink", shift: [5, 0] });
    } else if (cut) {
      const says = { name: `“${one.text}” after the sampler's steps: cut by ${nameOf(cut)}`, value: 0, unit: "probability" };
      leaf.text(`c${id}.cut`, [end, v], `cut by ${nameOf(cut)}`, { ...text, alpha: leaf.done(0.5, 0.8), most: (1 - end) * leaf.size.width, says });
    }
  }
}
