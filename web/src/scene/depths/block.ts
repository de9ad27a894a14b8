/** Depth 2: one block of a layer for one token, as a sheet. */

import type { Camera } from "../places/camera";
import type { Data, Moment } from "../data/data";
import type { DepthScene } from "./depth";
import { attention } from "../blocks/attention";
import { heads } from "../blocks/heads";
import { logits } from "../blocks/logits";
import { mlp } from "../blocks/mlp";
import { norm } from "../blocks/norm";
import { qkv } from "../blocks/qkv";
import { rope } from "../blocks/rope";
import { row } from "../blocks/row";
import { text } from "../blocks/text";
import { blockPlace, sheetStrength } from "./entered";
import { Leaf } from "./leaf";
import type { Mark } from "../marks/marks";
import type { BlockNumbers } from "../data/near";
import { Once } from "../marks/once";

function fill(leaf: Leaf, numbers: BlockNumbers, data: Data): void {
  switch (numbers.block) {
    case "norm":
    case "mlp_norm": return norm(leaf, numbers, data);
    case "qkv": return qkv(leaf, numbers, data);
    case "rope": return rope(leaf, numbers, data);
    case "attention": return attention(leaf, numbers, data);
    case "heads": return heads(leaf, numbers, data);
    case "mlp": return mlp(leaf, numbers, data);
    case "text": return text(leaf, numbers, data);
    case "row": return row(leaf, numbers, data);
    case "logits": return logits(leaf, numbers, data);
  }
}

const kept = new Once();

function marks(data: Data, camera: Camera, { share }: Moment): readonly Mark[] {
  const [numbers, rect] = [data.near?.block, blockPlace(data)];
  if (!numbers || !rect) return [];
  return kept.of(numbers, data, camera, share, () => {
    const leaf = new Leaf(`b.${numbers.block}`, rect, camera, share);
    fill(leaf, numbers, data);
    return leaf.marks;
  });
}

export const block: DepthScene = { name: "block", strength: sheetStrength, marks };
