/** A row of the table: the id says which. */

import { count, visible } from "../../lib/format";
import type { Data } from "../data/data";
import type { Leaf } from "../depths/leaf";
import type { RowNumbers } from "../data/near";
import { productPart } from "../places/sheet";
import { lengthOf, lengthText, productPlace, tokenAt } from "./shared";

export function row(leaf: Leaf, numbers: RowNumbers, data: Data): void {
  const { id, row: values, pos, text } = numbers;
  const { V, D } = data.shape;
  const part = productPart("embed_tokens");
  const v = part.v1 - (part.v1 - part.v0) * Math.min(0.98, Math.max(0.02, id / V)); // where the row lies in the table
  leaf.text("id", [0.5, 0.1], `${visible(text)}  →  id ${id}`, { size: "large", align: "center", ink: "ink", most: leaf.size.width, says: { name: `token ${pos}, “${text}”`, value: id, unit: "id" } });
  leaf.arrow("in", [0.5, 0.16], [0.5, part.v0]);
  leaf.box("table", part, "soft", { outlined: true, corner: 4, says: { name: "the table", value: `${count(V)} × ${count(D)}`, unit: "rows × numbers" }, enter: { ...productPlace("embed_tokens", numbers, data), row: id } });
  leaf.text("table.name", [0.5, (v > (part.v0 + part.v1) / 2 ? part.v0 : part.v1)], `the table: ${count(V)} rows of ${D}`, { align: "center", size: "normal", ink: "ink", shift: [0, v > (part.v0 + part.v1) / 2 ? -14 : 14], most: (part.u1 - part.u0) * leaf.size.width - 6 });
  leaf.line("mine", [[part.u0, v], [part.u1, v]], "chosen", 3);
  const way = leaf.done(0.1, 0.6);
  leaf.line("way", [[part.u1, v], [part.u1 + 0.08, v], [part.u1 + 0.08, v + (0.76 - v) * way]], "chosen", 1.5);
  leaf.text("mine.name", [part.u1 + 0.1, v], leaf.isNarrow ? count(id) : `row ${count(id)}`, { mono: true, ink: "chosen", most: 0.19 * leaf.size.width, shift: [0, -9] });
  leaf.row("row", [0.77, 0.95], values, { label: `row ${count(id)}`, value: lengthText(values), alpha: leaf.done(0.5, 0.9), says: lengthOf(`row of ${tokenAt(data, pos)}: its stream begins`, values), cell: (_, i) => ({ name: `row[${i}] of ${tokenAt(data, pos)}` }) });
}
