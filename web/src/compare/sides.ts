/** The sides of a comparison as lines of Python. */
import { literal, quoted } from "../lib/python";

const EXPERIMENTS: Record<string, string> = {
  modules: "llama.inspect.edited()",
  "rope-off": 'llama.inspect.edited(experiment=Experiment(rope_scaling="off"))',
};

/** The folder of a checkpoint as the run names it: where the run lies, the page does not know. */
export function checkpoint(run: string, step: number): string {
  return `${run}/step-${String(step).padStart(8, "0")}`;
}

/** Lines that make the sides, by the names of their variables, and what puts a line to where they are there. */
export function opened(sides: readonly (readonly [variable: string, id: string])[]): { first: string[]; within: (line: string) => string[] } {
  const isExperiment = ([, id]: readonly [string, string]): boolean => id in EXPERIMENTS;
  const blocks = sides.filter(isExperiment).map(([variable, id]) => `with ${EXPERIMENTS[id]} as ${variable}:`);
  const needs = sides.some(([, id]) => id === "rope-off") ? ["from llamarium.inspect.interventions.experiments import Experiment", ""] : [];
  const made = sides.filter((one) => !isExperiment(one)).map(([variable, id]) => `${variable} = ${expression(id)}`);
  const depth = (i: number): string => "    ".repeat(i);
  return {
    first: [...needs, ...made],
    within: (line) => [...blocks.map((block, i) => depth(i) + block), depth(blocks.length) + line],
  };
}

function expression(id: string): string {
  const [kind, ...rest] = id.split(":");
  const name = rest.join(":");
  if (id === "model") return "llama";
  if (id === "base") return "llamarium.load(llama.name)  # without adapter=, and else as above";
  if (kind === "adapter") return `llamarium.load(llama.name, adapter="FOLDER")  # the server's adapter ${quoted(name)}`;
  if (kind === "reference") {
    const [reference = "", type = ""] = [rest.slice(0, -1).join(":"), rest.at(-1)];
    return `llamarium.load(${quoted(reference)}, dtype="float32")${type === "float32" ? "" : `.inspect.variant(${literal(type)})`}`;
  }
  if (kind !== "checkpoint") return `llama.inspect.variant(${literal(id)})`;
  const end = name.lastIndexOf(":");
  return `llamarium.load(${quoted(checkpoint(name.slice(0, end), Number(name.slice(end + 1))))})  # run this in the parent folder of the run`;
}
