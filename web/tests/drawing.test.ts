import { describe, expect, it } from "vitest";
import { cellAt, drawnAt } from "../src/lib/drawing";
import { large } from "../src/lib/format";
import { habits } from "../src/lib/patterns";

describe("a pointer on a drawing", () => {
  const cells = { left: 24, top: 24, wide: 10, high: 10, rows: 30, cols: 32 };
  const size = { width: 344, height: 324 };
  it("names the cell that is under it, also where the drawing is shown smaller", () => {
    const whole = { left: 13, top: 100, width: 344, height: 324 };
    expect(cellAt(drawnAt({ clientX: 13 + 24 + 315, clientY: 124 }, whole, size), cells)).toEqual({ row: 0, col: 31 });
    const squeezed = { left: 13, top: 100, width: 334, height: 324 };
    expect(cellAt(drawnAt({ clientX: 13 + ((24 + 305) * 334) / 344, clientY: 124 }, squeezed, size), cells)).toEqual({ row: 0, col: 30 });
  });
  it("names none beside them", () => {
    expect(cellAt({ x: 23, y: 30 }, cells)).toBeNull();
    expect(cellAt({ x: 30, y: 324 }, cells)).toBeNull();
  });
});

it("where heads look on the whole are means over the queries that have a choice", () => {
  const values = Float32Array.from([1, 0, 0, 0.25, 0.75, 0, 0.5, 0.25, 0.25].concat([1, 0, 0, 1, 0, 0, 1, 0, 0]));
  expect(habits({ values, shape: [1, 2, 3, 3] })).toEqual([
    { layer: 0, head: 0, first: 0.375, itself: 0.5, before: 0.25 },
    { layer: 0, head: 1, first: 1, itself: 0, before: 0.5 },
  ]);
});

it("a count is rounded before its unit is chosen", () => {
  expect([999, 999_499, 999_500, 999_900, 1e6, 999_999_999].map(large)).toEqual(["999", "999 k", "1.00 M", "1.00 M", "1.00 M", "1.00 G"]);
});
