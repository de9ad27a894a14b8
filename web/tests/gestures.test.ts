/** Drag, pinch and wheel as functions: what they make of a camera. */
import { describe, expect, test } from "vitest";
import { project, unproject, type Camera } from "../src/scene/places/camera";
import { dragged, kept, pinched, wheeled, zoomed } from "../src/scene/places/gestures";

const rect = { x0: 2, x1: 6, y0: 0, y1: 10 };
const size = { width: 400, height: 500 };

describe.each([false, true])("a drag, turned: %s", (turned) => {
  const camera: Camera = { rect, size, turned };

  test("takes the point along that it began at", () => {
    const [from, to] = [[100, 120], [180, 90]] as const;
    const under = unproject(camera, from);
    const [x, y] = project({ ...camera, rect: dragged(camera, from, to) }, under);
    expect([x, y]).toEqual([expect.closeTo(180), expect.closeTo(90)]);
  });

  test("leaves the zoom", () => {
    const { x0, x1, y0, y1 } = dragged(camera, [0, 0], [30, 40]);
    expect([x1 - x0, y1 - y0]).toEqual([expect.closeTo(4), expect.closeTo(10)]);
  });
});

describe("a camera", () => {
  const all = { x0: 0, x1: 8, y0: -2, y1: 12 };

  test("within the world stays", () => expect(kept(rect, all, undefined)).toEqual(rect));
  test("beyond an edge comes back to it", () => {
    expect(kept({ x0: -3, x1: 1, y0: 8, y1: 18 }, all, undefined)).toEqual({ x0: 0, x1: 4, y0: 2, y1: 12 });
    expect(kept({ x0: 7, x1: 11, y0: -9, y1: 1 }, all, undefined)).toEqual({ x0: 4, x1: 8, y0: -2, y1: 8 });
  });
  test("that sees more than the world stands in its middle", () => expect(kept({ x0: 0, x1: 20, y0: 0, y1: 10 }, all, undefined)).toEqual({ x0: -6, x1: 14, y0: 0, y1: 10 }));
  test("is free along an axis that is scrolled by the page", () => expect(kept({ x0: -3, x1: 1, y0: 80, y1: 90 }, all, "y")).toEqual({ x0: 0, x1: 4, y0: 80, y1: 90 }));
});

test("fingers that part go in, that meet go out; a tremble and a first touch do nothing", () => {
  expect([pinched(100, 120), pinched(100, 80), pinched(100, 104), pinched(100, 97), pinched(0, 90)]).toEqual([1, -1, 0, 0, 0]);
});

test("a wheel's turns add up, and what is left of another step is not kept", () => {
  let turns = 0;
  const steps = [-20, -30, -40, -5, 50, 30].map((by) => {
    const next = wheeled(turns, by);
    turns = next.turns;
    return next.step;
  });
  expect(steps).toEqual([0, 0, 1, 0, 0, -1]);
  expect(turns).toBe(0);
});

test("three steps lead to the next depth, and as many back", () => {
  const way = [1, 1, 1, -1, -1, -1].map(((share) => (by) => (share = zoomed(share, by as 1 | -1)))(0));
  expect(way).toEqual([0.34, 0.68, 1, expect.closeTo(0.66), expect.closeTo(0.32), 0]);
});
