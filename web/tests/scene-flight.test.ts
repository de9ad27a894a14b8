/** Flights and a pass that rises, as functions of time and data. */

import { describe, expect, it } from "vitest";
import { project, type Camera } from "../src/scene/places/camera";
import { REST, type Data } from "../src/scene/data/data";
import { blockAt, commonPlace, legsOf, msOf, rectAt, riseAt, riseMs } from "../src/scene/places/flight";
import { frameOf } from "../src/scene/places/layout";
import type { Mark, Rect } from "../src/scene/marks/marks";
import type { Near } from "../src/scene/data/near";
import type { Place } from "../src/scene/places/place";
import { sheets } from "../src/scene/scene";
import { samePlace } from "../src/scene/places/stations";
import { blockNumbers, cameraAt, dataOf, farOf, LAYERS, layerNumbers, PHONE, productNumbers, TOKENS, WIDE } from "./scene-given";

const AT = { pos: 5, layer: 3, head: 1 };
const EXTENT = { tokens: TOKENS, layers: LAYERS };
const WHOLE: Place = { ...AT, depth: 0 };
const LAYER: Place = { ...AT, depth: 1 };
const BLOCK: Place = { ...AT, depth: 2, block: "mlp" };
const PRODUCT: Place = { ...AT, depth: 3, block: "mlp", product: "up_proj", row: 9 };
const NUMBER: Place = { ...PRODUCT, depth: 4 };
const BESIDE: Place = { ...AT, depth: 2, block: "attention" };
const ELSEWHERE: Place = { ...AT, layer: 1, depth: 2, block: "norm" };

const near: Near = { layer: layerNumbers(3), block: blockNumbers("mlp", 5, 3), product: productNumbers("up_proj", 5, 3) };
const data: Data = { ...dataOf(near, AT), far: farOf() };

/** The marks that can be seen: on a sheet that is drawn, and in the picture. */
function seen(of: Data, camera: Camera): Set<string> {
  const isIn = (mark: Mark): boolean => {
    const points = "points" in mark ? mark.points : "rect" in mark ? [[mark.rect.x0, mark.rect.y0], [mark.rect.x1, mark.rect.y1]] as const : [mark.at];
    const placed = points.map((point) => project(camera, point));
    const over = (i: 0 | 1, end: number): boolean => Math.max(...placed.map((one) => one[i])) >= 0 && Math.min(...placed.map((one) => one[i])) <= end;
    return over(0, camera.size.width) && over(1, camera.size.height);
  };
  return new Set(sheets(of, camera).flatMap((sheet) => sheet.marks.filter(isIn).map((mark) => mark.id)));
}

const within = (inner: Rect, outer: Rect): boolean => inner.x0 >= outer.x0 - 1e-9 && inner.x1 <= outer.x1 + 1e-9 && inner.y0 >= outer.y0 - 1e-9 && inner.y1 <= outer.y1 + 1e-9;

describe("a flight", () => {
  const ways: readonly (readonly [string, Place, Place])[] = [
    ["into a layer", WHOLE, LAYER], ["into a block", LAYER, BLOCK], ["into a product", BLOCK, PRODUCT], ["into a number", PRODUCT, NUMBER], ["all the way in", WHOLE, NUMBER], ["all the way out", NUMBER, WHOLE],
    ["to a block beside", BLOCK, BESIDE], ["to another layer", BLOCK, ELSEWHERE],
  ];

  /** Whether a leg passes a depth that neither end has. */
  const isFar = (from: Place, to: Place): boolean => [from, to].some((place) => Math.abs(place.depth - commonPlace(from, to).depth) > 1);

  it.each(ways)("%s begins and ends where it says, and goes through nothing else", (_, from, to) => {
    for (const size of [WIDE, PHONE]) {
      const { rect, turned } = cameraAt(from, size);
      const legs = legsOf(rect, from, to, EXTENT, turned);
      expect(rectAt(legs, 0)).toEqual(rect);
      expect(rectAt(legs, msOf(legs))).toEqual(frameOf(to, EXTENT, turned));
      for (const leg of legs) {
        const [a, b] = [leg.from, leg.to];
        const outer = { x0: Math.min(a.x0, b.x0), y0: Math.min(a.y0, b.y0), x1: Math.max(a.x1, b.x1), y1: Math.max(a.y1, b.y1) };
        if (size === WIDE) expect(within(a, b) || within(b, a)).toBe(true); // on a phone a frame shows some of the tokens
        for (let share = 0; share <= 1; share += 0.1) expect(within(rectAt([leg], share * leg.ms), outer)).toBe(true);
      }
    }
  });

  it.each(ways)("%s never shows what is in neither end of a leg", (_, from, to) => {
    const { rect, size, turned } = cameraAt(from, WIDE);
    for (const leg of legsOf(rect, from, to, EXTENT, turned)) {
      const ends = [leg.from, leg.to].map((one) => seen(data, { rect: one, size, turned }));
      const [mine, theirs] = ends as [Set<string>, Set<string>];
      // Between two depths that are not neighbours lie those between them: what these show is in their own frames.
      const between = [LAYER, BLOCK, PRODUCT].flatMap((place) => [...seen(data, { rect: frameOf(place, EXTENT, turned), size, turned })]);
      const all = new Set([...mine, ...theirs, ...(isFar(from, to) ? between : [])]);
      for (let share = 0; share <= 1; share += 0.05) {
        const ids = seen(data, { rect: rectAt([leg], share * leg.ms), size, turned });
        expect([...ids].filter((id) => !all.has(id))).toEqual([]);
      }
    }
  });

  it("goes by what holds both places", () => {
    expect(samePlace(commonPlace(BLOCK, BESIDE), LAYER)).toBe(true);
    expect(commonPlace(BLOCK, ELSEWHERE).depth).toBe(0);
    expect(samePlace(commonPlace(NUMBER, BLOCK), BLOCK)).toBe(true);
    expect(legsOf(frameOf(BLOCK, EXTENT), BLOCK, BESIDE, EXTENT)).toHaveLength(2);
    expect(legsOf(frameOf(LAYER, EXTENT), LAYER, NUMBER, EXTENT)).toHaveLength(1);
  });

  it("takes at most a second a leg", () => {
    for (const [, from, to] of ways) for (const leg of legsOf(frameOf(from, EXTENT), from, to, EXTENT)) expect(leg.ms).toBeLessThanOrEqual(1000);
  });
});

describe("a pass that rises", () => {
  it("has all columns rise together in 1.6 s for 30 layers, and one alone in half of that", () => {
    expect([riseMs(30, false), riseMs(30, true)]).toEqual([1600, 800]);
    expect(riseAt(0, 0, 30)).toEqual({ from: 0, height: 0, share: 1 });
    expect(riseAt(800, 0, 30)).toEqual({ from: 0, height: 15.5, share: 1 });
    expect(riseAt(1600, 0, 30)).toBe(REST);
    expect(riseAt(400, 7, 30)).toEqual({ from: 7, height: 15.5, share: 1 });
    expect(riseAt(800, 7, 30)).toBe(REST);
  });

  it("computes a block from nothing to rest", () => {
    expect(blockAt(0).share).toBe(0);
    expect(blockAt(1e6)).toBe(REST);
  });
});
