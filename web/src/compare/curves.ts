/** The curves of a training run, as plots: of a metric in training, and of the same in validation. */
import type { Series } from "../parts/Plot.svelte";
import type { RunHistory } from "../schema";

export interface Curves {
  readonly id: string;
  readonly title: string;
  readonly unit: string;
  readonly series: readonly Series[];
}

type Points = Series["points"];

/** Title and unit of the metrics that Llamarium writes, in the order in which they are shown. */
const METRICS: Readonly<Record<string, readonly [title: string, unit: string]>> = {
  reward: ["Reward", "mean reward"],
  loss: ["Loss", "nats per token"],
  reward_accuracy: ["Pairs ranked correctly", "share"],
  reward_margin: ["Margin of rewards", "chosen minus rejected"],
  kl: ["KL from the reference", "nats per token"],
  length: ["Length of answers", "tokens"],
  entropy: ["Entropy of answers", "nats per token"],
  reward_spread: ["Spread of rewards in a group", "standard deviation"],
  cut: ["Answers cut off", "share"],
  equal_groups: ["Groups of equal rewards", "share"],
  rewards_failed: ["Answers without a reward", "answers a step"],
  learning_rate: ["Learning rate", "learning rate"],
  grad_norm: ["Gradient norm", "norm before clipping"],
  tokens_per_s: ["Throughput", "tokens per second"],
  mfu: ["Model FLOPs utilization", "share of the peak"],
  largest_difference: ["Sampling against training", "largest difference of log P"],
};
const BY_FUNCTION = "reward/";
const order = Object.keys(METRICS);
const rank = (name: string): number => (order.includes(name) ? order.indexOf(name) : order.length);

/** The points of a curve; none where a run has no such curve. */
export function pointsOf(curves: RunHistory["curves"], event: string, name: string): Points {
  const { steps, values } = curves.find((one) => one.event === event && one.name === name) ?? { steps: [], values: [] };
  return steps.map((step, i) => [step, values[i] as number]);
}

/** A moving average over about a twentieth of the points; the first ones weigh what they should. */
export function smoothed(points: Points): [number, number][] {
  const keep = 1 - 1 / Math.max(1, points.length / 20);
  let [total, weight] = [0, 0];
  return points.map(([x, y]) => {
    [total, weight] = [keep * total + (1 - keep) * y, keep * weight + 1 - keep];
    return [x, total / weight];
  });
}

/** The plots of a run, what it is trained for first; a run on rewards is not trained for its loss. What is always 0 is left out. */
export function curvesOf({ curves }: Pick<RunHistory, "curves">): Curves[] {
  const points = (event: string, name: string): Points => pointsOf(curves, event, name);
  const names = [...new Set(curves.map((one) => one.name))].filter((name) => !name.startsWith(BY_FUNCTION));
  const hasReward = names.includes("reward");
  const plots = names.sort((a, b) => rank(a) - rank(b)).map((name): Curves => {
    const [title, unit] = METRICS[name] ?? [name.replaceAll("_", " "), name];
    const [training, validation] = [points("step", name), name === "loss" && hasReward ? [] : points("validation", name)];
    const isNoisy = (name === "loss" || name === "reward") && training.length > 20;
    const series: Series[] = [
      { name: isNoisy ? "training, smoothed" : "training", points: isNoisy ? smoothed(training) : training },
      { name: "validation", points: validation, look: validation.length > 40 ? "line" : "dots" },
      { name: "training", points: isNoisy ? training : [], look: "faint" },
    ];
    return { id: name, title, unit, series: series.filter((one) => one.points.length) };
  });
  const byFunction = curves.filter((one) => one.event === "step" && one.name.startsWith(BY_FUNCTION)).map((one) => ({ name: one.name.slice(BY_FUNCTION.length), points: points("step", one.name) }));
  if (byFunction.length) plots.splice(1, 0, { id: BY_FUNCTION, title: "Rewards by function", unit: "mean reward", series: byFunction });
  return plots.filter((one) => one.series.some(({ points }) => points.some(([, y]) => y !== 0)));
}

/** Runs on one plot: those that measure what the chosen one is trained for; in validation where all of them have one. */
export function compared(histories: ReadonlyMap<string, RunHistory>, { curves: own }: RunHistory): Curves {
  const name = own.some((one) => one.name === "reward") ? "reward" : "loss";
  const alike = [...histories].filter(([, { curves }]) => name === "reward" || !curves.some((one) => one.name === "reward"));
  const measuring = alike.filter(([, { curves }]) => curves.some((one) => one.name === name));
  const event = measuring.every(([, { curves }]) => pointsOf(curves, "validation", name).length) ? "validation" : "step";
  const series = measuring.map(([run, { curves }]) => ({ name: run, points: pointsOf(curves, event, name) }));
  return { id: "all", title: `${event === "step" ? "Training" : "Validation"} ${name} of the runs`, unit: (METRICS[name] as readonly [string, string])[1], series: series.filter((one) => one.points.length) };
}
