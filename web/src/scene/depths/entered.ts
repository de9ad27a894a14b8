/** How near the camera is to what has been entered: a block, a matrix in it, a number in that. */

import { project, type Camera } from "../places/camera";
import type { Data } from "../data/data";
import { fade } from "./depth";
import { rectOf } from "../places/layout";
import type { Rect } from "../marks/marks";
import type { Place, Product } from "../places/place";
import { blockOf } from "../places/sheet";

const NEAR_LAYER = [0.25, 0.55] as const; // of the picture's height that a layer takes
const NEAR = [0.3, 0.8] as const; // of the picture's width and height that a sheet fills

/** How much of the picture a rectangle fills, of the side that fills less; beyond one, the camera is within it. */
function filled(rect: Rect, camera: Camera): number {
  const [a, b] = [project(camera, [rect.x0, rect.y0]), project(camera, [rect.x1, rect.y1])];
  return Math.min(Math.abs(b[0] - a[0]) / camera.size.width, Math.abs(b[1] - a[1]) / camera.size.height);
}

/** Whether any of a rectangle is in the picture. */
function isSeen(rect: Rect, camera: Camera): boolean {
  return rect.x1 > camera.rect.x0 && rect.x0 < camera.rect.x1 && rect.y1 > camera.rect.y0 && rect.y0 < camera.rect.y1;
}

const nearness = (rect: Rect, camera: Camera): number => (isSeen(rect, camera) ? fade(filled(rect, camera), ...NEAR) : 0);

/** One deeper than a place, at what is chosen or strongest there; none where nothing is deeper. For who goes by keys. */
export function inside(place: Place, data: Data): Place | undefined {
  const { depth, pos, layer, head, block } = place;
  const here = { pos, layer, head };
  const numbers = data.near?.block;
  if (depth === 0) return { ...here, depth: 1 };
  if (depth === 1) return { ...here, depth: 2, block: "attention" };
  if (depth === 3) return place.product === "embed_tokens" ? undefined : { ...place, depth: 4, row: place.row ?? 0 };
  if (depth === 4 || !block) return undefined;
  const of = (product: Product, row: number): Place => ({ ...here, depth: 3, block, product, row });
  if (block === "qkv") return of("q_proj", head * data.shape.H);
  if (block === "heads") return of("o_proj", 0);
  if (block === "mlp") return of("gate_proj", numbers?.block === "mlp" ? (numbers.neurons[0]?.index ?? 0) : 0);
  if (block === "logits") return of("lm_head", numbers?.block === "logits" ? (numbers.candidates[0]?.token_id ?? 0) : 0);
  return block === "row" ? of("embed_tokens", 0) : undefined;
}

/** How near the camera is to a layer whose numbers are there, by the share of the picture that it takes: so far it is drawn in place of the whole. */
export function layerNearness({ near }: Data, camera: Camera): number {
  const { rect } = camera;
  const at = near?.layer?.layer;
  if (at === undefined || rect.y1 <= at || rect.y0 >= at + 1) return 0;
  return fade(1 / (rect.y1 - rect.y0), ...NEAR_LAYER);
}

/** Where the sheets are that there are numbers for. */
export function blockPlace(data: Data): Rect | undefined {
  const block = data.near?.block;
  return block && rectOf({ depth: 2, pos: block.pos, layer: block.layer, head: 0, block: block.block }, data.extent);
}

export function productPlaces(data: Data, turned: boolean): { matrix: Rect; number: Rect } | undefined {
  const product = data.near?.product;
  if (!product) return undefined;
  const place: Place = { depth: 3, pos: product.pos, layer: product.layer, head: 0, block: blockOf(product.product), product: product.product };
  return { matrix: rectOf(place, data.extent, turned), number: rectOf({ ...place, depth: 4 }, data.extent, turned) };
}

export function numberStrength(data: Data, camera: Camera): number {
  const places = productPlaces(data, camera.turned);
  return places ? nearness(places.number, camera) : 0;
}

export function productStrength(data: Data, camera: Camera): number {
  const places = productPlaces(data, camera.turned);
  return places ? nearness(places.matrix, camera) * (1 - numberStrength(data, camera)) : 0;
}

export function blockStrength(data: Data, camera: Camera): number {
  const rect = blockPlace(data);
  return rect ? nearness(rect, camera) : 0;
}

/** A block's own strength: what is entered within it lies on top of it. */
export function sheetStrength(data: Data, camera: Camera): number {
  const places = productPlaces(data, camera.turned);
  return blockStrength(data, camera) * (1 - (places ? nearness(places.matrix, camera) : 0));
}
