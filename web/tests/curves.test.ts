import { describe, expect, test } from "vitest";
import { compared, curvesOf, smoothed } from "../src/compare/curves";
import type { RunHistory } from "../src/schema";

type Curve = RunHistory["curves"][number];
const curve = (event: Curve["event"], name: string, values: number[]): Curve => ({ event, name, steps: values.map((_, i) => 10 * (i + 1)), values });
const run = (...curves: Curve[]): RunHistory => ({ curves }) as unknown as RunHistory;

describe("curves of a run", () => {
  test("the loss comes first, with the validation as dots, and what is unknown last", () => {
    const plots = curvesOf(run(curve("step", "a_new_one", [1]), curve("step", "grad_norm", [2, 1]), curve("step", "loss", [4, 3]), curve("validation", "loss", [3.5])));
    expect(plots.map((one) => [one.id, one.title])).toEqual([["loss", "Loss"], ["grad_norm", "Gradient norm"], ["a_new_one", "a new one"]]);
    expect(plots[0]?.series).toEqual([
      { name: "training", points: [[10, 4], [20, 3]] },
      { name: "validation", points: [[10, 3.5]], look: "dots" },
    ]);
  });

  test("a run on rewards is shown by its reward; its validation's loss is the reward again", () => {
    const plots = curvesOf(run(curve("step", "loss", [-1]), curve("validation", "loss", [-2]), curve("step", "reward", [1]), curve("validation", "reward", [2]), curve("step", "reward/exact", [1]), curve("step", "cut", [0, 0])));
    expect(plots.map((one) => one.id)).toEqual(["reward", "reward/", "loss"]);
    expect(plots[1]?.series.map((one) => one.name)).toEqual(["exact"]);
    expect(plots[2]?.series.map((one) => one.name)).toEqual(["training"]);
  });

  test("a noisy curve is smoothed, and stands behind", () => {
    const noisy = Array.from({ length: 100 }, (_, i) => i % 2);
    const [loss] = curvesOf(run(curve("step", "loss", noisy)));
    expect(loss?.series.map((one) => one.look)).toEqual([undefined, "faint"]);
    const means = smoothed(noisy.map((y, i) => [i, y]));
    expect(means[0]).toEqual([0, 0]);
    expect(means.slice(50).every(([, y]) => 0.3 < y && y < 0.7)).toBe(true);
  });

  test("runs are compared in what the chosen one is trained for", () => {
    const text = run(curve("step", "loss", [3]), curve("validation", "loss", [2])), rewards = run(curve("step", "loss", [0]), curve("validation", "loss", [-1]), curve("validation", "reward", [1]), curve("step", "reward", [1]));
    const all = new Map([["text", text], ["other", text], ["rewards", rewards]]);
    expect(compared(all, text)).toMatchObject({ title: "Validation loss of the runs", series: [{ name: "text" }, { name: "other" }] });
    expect(compared(all, rewards)).toMatchObject({ title: "Validation reward of the runs", series: [{ name: "rewards", points: [[10, 1]] }] });
  });

  test("where a run has no validation, all are compared in training", () => {
    const validated = run(curve("step", "loss", [3]), curve("validation", "loss", [2])), other = run(curve("step", "loss", [4]));
    const together = compared(new Map([["validated", validated], ["other", other]]), validated);
    expect(together).toMatchObject({ title: "Training loss of the runs", series: [{ name: "validated", points: [[10, 3]] }, { name: "other", points: [[10, 4]] }] });
  });
});
