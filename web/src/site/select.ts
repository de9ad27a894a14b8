/** The part of an activation that a query selects: a layer, a head, a token, some tokens, or every so many. As `page/selection.py`. */
import { numbers, Refused, type Answer, type Fields } from "./asked";
import AXES from "./activations.json";
import { axesOf, type Name, type Pass, type Passes } from "./passes";
import { pick, range, stack, take, type Tensor } from "./tensor";

const MOST_BYTES = 64 * 2 ** 20; // of one answer

export function select(passes: Passes, pass: Pass, name: string, query: Fields): Answer {
  if (!(name in AXES)) throw new Refused(404, `there is no activation of this name; there are: ${Object.keys(AXES).join(", ")}`, "unknown_activation", "name");
  const axes = axesOf(name as Name);
  const tokens = pass.ids.length;
  const heads = axes.includes("N") ? passes.config.heads : passes.config.kvHeads;
  const layer = query.maybe("layer", { below: passes.config.layers });
  const head = query.maybe("head", { below: heads });
  const position = query.maybe("position", { below: tokens });
  const { stride, rows } = windowOf(query, tokens);
  if (layer !== undefined && !axes.startsWith("L")) throw without(name, "layer", "is outside of the layers");
  if (head !== undefined && !/[NK]/.test(axes)) throw without(name, "head", `has no heads, its axes are ${axes}`);
  const positions = position === undefined ? rows : [position];
  let found = ofLayers(passes, pass, name as Name, layer, positions);
  for (const axis of head === undefined ? [] : ["N", "K"]) if (found.axes.includes(axis)) found = pick(found, axis, head as number);
  if (position !== undefined) found = found.axes.includes("T") ? pick(found, "T", 0) : pick(found, "S", position);
  else if (stride > 1 && found.axes.includes("S")) found = take(found, "S", range(0, tokens, stride));
  return numbers(found, stride);
}

function ofLayers(passes: Passes, pass: Pass, name: Name, layer: number | undefined, positions: readonly number[]): Tensor {
  const isOfAll = axesOf(name).startsWith("L") && layer === undefined;
  const sizes = { ...passes.sizes(pass.ids.length), T: positions.length, ...(isOfAll ? {} : { L: 1 }) } as Record<string, number>;
  const bytes = [...axesOf(name)].reduce((product, axis) => product * (sizes[axis] as number), 4);
  if (bytes > MOST_BYTES) {
    throw new Refused(400, `these are ${bytes} bytes, and ${MOST_BYTES} are sent at most; ask for one layer, head or position`, "too_many_numbers", "stride");
  }
  if (!isOfAll) return passes.at(pass, name, layer, positions);
  return stack(range(0, passes.config.layers).map((one) => passes.at(pass, name, one, positions)), "L");
}

/** The tokens that a query selects of a text of so many. */
export function windowOf(query: Fields, tokens: number): { start: number; stop: number; stride: number; rows: number[] } {
  const start = query.whole("start", 0, { below: tokens });
  const stop = query.whole("stop", tokens, { least: start + 1, below: tokens + 1 });
  const stride = query.whole("stride", 1, { least: 1 });
  return { start, stop, stride, rows: range(start, stop, stride) };
}

function without(name: string, field: string, why: string): Refused {
  return new Refused(400, `${field} is given, and ${name} ${why}; leave it out`, "invalid_parameter", field);
}
