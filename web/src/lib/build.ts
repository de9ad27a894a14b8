/** What the server says of a learner's folder. */
import { get, json } from "./api";
import { type View, writeLink } from "./link";
import type { CourseView, HintView, Result, StepView } from "../schema";

export const buildApi = {
  course: (): Promise<CourseView> => json("GET", "/inspect/build"),
  /** As above, asked for once: which steps there are does not change. */
  steps: (): Promise<CourseView> => get("/inspect/build"),
  check: (step: string): Promise<Result> => json("POST", "/inspect/build/checks", { step }),
  hint: (step: string): Promise<HintView> => json("POST", "/inspect/build/hints", { step }),
};

/** The step that is shown: the one that is named, or the first that is open. */
export function stepAt(steps: readonly StepView[], name: string): StepView | undefined {
  return steps.find((one) => one.name === name) ?? steps.find((one) => !one.is_right) ?? steps[0];
}

/** A link to the stage where two numbers part, with the tokens that ran; undefined where the check was on random numbers. */
export function linkToPlace(view: View, step: StepView, place: Readonly<Record<string, unknown>>): string | undefined {
  const { ids, layer, T, N, K } = place;
  if (!Array.isArray(ids)) return undefined;
  const whole = (value: unknown): number => (typeof value === "number" ? value : 0);
  return writeLink({ ...view, stage: step.stage, fields: {}, ids: ids as number[], answer: undefined, token: undefined, layer: whole(layer), pos: whole(T), head: whole(N ?? K) });
}
