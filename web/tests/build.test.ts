import { expect, test } from "vitest";
import { linkToPlace, stepAt } from "../src/lib/build";
import { readLink } from "../src/lib/link";
import type { StepView } from "../src/schema";

const step = (name: string, is_right: boolean): StepView => ({
  number: 1, name, title: name, about: "", definition: "", section: "", stage: "rope", file: "", code: null, is_right, tries: 0, hints: [],
});
const VIEW = { stage: "build", layer: 3, head: 2, pos: 1, text: "x", bos: true, fields: { step: "rotate" } };

test("the step that is named, else the first that is open, else the first", () => {
  const steps = [step("embed", true), step("rotate", false), step("attend", false)];
  expect(stepAt(steps, "attend")?.name).toBe("attend");
  expect(stepAt(steps, "nothing")?.name).toBe("rotate");
  expect(stepAt([step("embed", true)], "")?.name).toBe("embed");
});

test("a place links to its stage, tokens, layer, position and head; one of random numbers to nothing", () => {
  const { view } = readLink(linkToPlace(VIEW, step("rotate", false), { ids: [5, 6, 7], layer: 4, T: 2, K: 1, H: 0 }) ?? "");
  expect(view).toMatchObject({ stage: "rope", ids: [5, 6, 7], layer: 4, pos: 2, head: 1 });
  expect(view.fields).toEqual({});
  expect(linkToPlace(VIEW, step("rotate", false), { T: 2 })).toBeUndefined();
});
