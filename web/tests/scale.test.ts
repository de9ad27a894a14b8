import { expect, test } from "vitest";
import { linear, logarithmic } from "../src/lib/scale";

test("round numbers of a span, within it", () => {
  expect(linear([0, 30], [0, 300]).ticks(6)).toEqual([0, 5, 10, 15, 20, 25, 30]);
  expect(linear([-0.04, 0.83], [0, 1]).ticks(4)).toEqual([0, 0.2, 0.4, 0.6, 0.8]);
  expect(linear([512, 1024], [0, 1]).ticks(3)).toEqual([600, 800, 1000]);
  expect(linear([1e-7, 5e-7], [0, 1]).ticks(4)).toEqual([1e-7, 2e-7, 3e-7, 4e-7, 5e-7]);
});

test("a domain is widened to round ends, and ends meet the range", () => {
  const y = linear([-0.04, 0.83], [200, 0], 10);
  expect(y.domain.map((end) => Number(end.toFixed(6)))).toEqual([-0.1, 0.9]);
  expect([y(-0.1), y(0.9), y(0.4)].map((at) => Number(at.toFixed(6)))).toEqual([200, 0, 100]);
});

test("of a logarithmic axis powers of ten, or 1, 2 and 5 between two", () => {
  expect(logarithmic([1, 49_152], [0, 1]).ticks(4)).toEqual([1, 100, 10_000]);
  expect(logarithmic([0.001, 1], [0, 1]).ticks(4)).toEqual([0.001, 0.01, 0.1, 1]);
  expect(logarithmic([3, 30], [0, 1]).ticks(4)).toEqual([5, 10, 20]);
  expect(logarithmic([1, 100], [0, 300])(10)).toBeCloseTo(150);
});
