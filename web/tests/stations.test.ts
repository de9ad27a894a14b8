/** The place that a link names: nonsense in it is no place, and what belongs to a larger model is brought into this one. */

import { describe, expect, it } from "vitest";
import type { Product } from "../src/scene/places/place";
import { fitted, placeOf, titleOf } from "../src/scene/places/stations";
import { dataOf, SHAPE } from "./scene-given";

const AT = { pos: 2, layer: 1, head: 0 };

describe("the place of a link", () => {
  it.each(["zzz", "__proto__", "constructor", "toString"])("is the whole for the stage %s, which there is not", (stage) => {
    expect(placeOf(stage, {}, AT)).toEqual({ ...AT, depth: 0 });
  });

  it.each([
    ["q_proj", SHAPE.N * SHAPE.H], ["k_proj", SHAPE.K * SHAPE.H], ["v_proj", SHAPE.K * SHAPE.H], ["o_proj", SHAPE.D],
    ["gate_proj", SHAPE.F], ["up_proj", SHAPE.F], ["down_proj", SHAPE.D], ["lm_head", SHAPE.V],
  ] as const)("has the last row of %s where its row is none", (product: Product, rows) => {
    const place = placeOf("map", { depth: "4", product, row: "99999" }, AT);
    expect(titleOf(fitted(place, dataOf()))).toBe(`row ${rows - 1}`);
    const last = { ...place, row: rows - 1 };
    expect(fitted(last, dataOf())).toEqual(last);
  });

  it("has of the table the row that the token takes", () => {
    const data = dataOf();
    expect(fitted(placeOf("embedding", { depth: "4", product: "embed_tokens", row: "7" }, AT), data)).toMatchObject({ depth: 4, row: data.tokens[AT.pos]?.id });
  });
});
