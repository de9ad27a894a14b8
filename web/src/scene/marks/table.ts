/** Marks as rows of a table: for who cannot see the picture, and for who wants its numbers. */

import { number } from "../../lib/format";
import type { Cells, Mark } from "./marks";
import type { Place } from "../places/place";
import type { Found } from "./pick";

export interface Row {
  readonly id: string;
  readonly name: string;
  readonly value: number | string;
  readonly unit: string | undefined;
  readonly enter: Place | undefined;
}

/** Every mark that says something, in its order; then of cells each one, or the first ones where they are many. */
export function rowsOf(marks: readonly Mark[], mostCells = 256): Row[] {
  const own = marks.flatMap((mark) => (mark.says ? [{ id: mark.id, name: mark.says.name, value: mark.says.value, unit: mark.says.unit, enter: mark.enter }] : []));
  return [...own, ...marks.flatMap((mark) => (mark.kind === "cells" && mark.cell ? cellsOf(mark, mostCells) : []))];
}

function cellsOf(mark: Cells, most: number): Row[] {
  return Array.from({ length: Math.min(most, mark.rows * mark.columns) }, (_, i) => cellOf(mark, Math.floor(i / mark.columns), i % mark.columns));
}

function cellOf(mark: Cells, row: number, column: number): Row {
  const told = mark.cell?.(row, column);
  const value = mark.values[row * mark.columns + column] as number;
  return { id: `${mark.id}.${row}.${column}`, name: told?.name ?? mark.says?.name ?? "", value, unit: undefined, enter: told?.enter ?? mark.enter };
}

/** What was found under a point, as a row. */
export function rowOf({ mark, cell }: Found): Row | undefined {
  if (mark.kind === "cells" && cell && mark.cell) return cellOf(mark, cell.row, cell.column);
  return rowsOf([mark])[0];
}

/** A row's number as it is written: seven digits tell every float32 but the last bit apart. */
export function written({ value, unit }: Pick<Row, "value" | "unit">): string {
  const text = typeof value === "string" ? value : Number.isInteger(value) ? String(value) : number(value, 6);
  return unit ? `${text} ${unit}` : text;
}
