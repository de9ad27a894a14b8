import { describe, expect, it } from "vitest";
import { checkpoint, opened } from "../src/compare/sides";

describe("the sides of a comparison as Python", () => {
  it("makes what is made, and opens what is an experiment", () => {
    const { first, within } = opened([["side", "NF4"], ["against", "model"]]);
    expect(first).toEqual(['side = llama.inspect.variant("NF4")', "against = llama"]);
    expect(within("found = 1")).toEqual(["found = 1"]);
  });

  it("nests experiments", () => {
    const { first, within } = opened([["side", "rope-off"], ["against", "modules"]]);
    expect(first).toEqual(["from llamarium.inspect.interventions.experiments import Experiment", ""]);
    expect(within("found = 1")).toEqual([
      'with llama.inspect.edited(experiment=Experiment(rope_scaling="off")) as side:',
      "    with llama.inspect.edited() as against:",
      "        found = 1",
    ]);
  });

  it("names checkpoints and adapters as strings that nothing gets out of", () => {
    const { first } = opened([["side", 'checkpoint:a"b:c:5'], ["against", 'adapter:x"\n:y']]);
    expect(first[0]).toContain('llamarium.load("a\\"b:c/step-00000005")');
    expect(first[1]).toContain("# the server's adapter \"x\\\"\\n:y\"");
    expect(checkpoint("run", 1200)).toBe("run/step-00001200");
  });
});
