/** A sheet while it is filled with marks: strips of numbers with a name and a value, bars, texts. What stands where depends on the picture's size, never on the zoom. */

import { limitOf } from "../../lib/colors";
import type { Camera, Size } from "../places/camera";
import { fade } from "./depth";
import { MARGIN } from "../places/layout";
import { SIZES, widthOf } from "../marks/look";
import type { Box, Cells, Ink, Mark, Point, Rect, Text } from "../marks/marks";
import { atOf, partOf, type Part } from "../places/sheet";

type Says = NonNullable<Mark["says"]>;

/** How a strip or a bar is drawn beyond its numbers. */
interface Look {
  readonly says?: Says | undefined;
  readonly alpha?: number | undefined;
  readonly hue?: number | undefined;
  readonly enter?: Mark["enter"] | undefined;
}

interface StripLook extends Look {
  readonly scale?: Cells["scale"];
  /** What has the full colour; by itself the largest, or below those that stand out. */
  readonly limit?: number | undefined;
  readonly cell?: Cells["cell"] | undefined;
  /** So many rows of cells; as many as cells need that are to be seen where left out. */
  readonly rows?: number;
}

interface RowLook extends StripLook {
  /** What it is, beside it, or above it on a narrow page. */
  readonly label: string;
  readonly labelInk?: Ink;
  /** Written behind it. */
  readonly value?: string | undefined;
}

const NARROW = 560; // pixels of a picture on which names stand above what they name
const LEAST = 1.2; // pixels of a cell
const LABEL = 17; // pixels of a line of text

/** Where names, strips and values stand on a wide page. */
export const COLUMNS = { label: 0, strip: 0.2, value: 0.86 } as const;

export class Leaf {
  readonly marks: Mark[] = [];
  readonly isNarrow: boolean;
  /** In pixels, where the sheet fills the picture. */
  readonly size: Size;

  constructor(
    readonly id: string,
    readonly rect: Rect,
    private readonly camera: Camera,
    /** How much of it has been computed, from 0 to 1. */
    readonly share = 1,
  ) {
    const { width, height } = camera.size;
    this.isNarrow = width < NARROW;
    this.size = { width: width / (1 + 2 * MARGIN), height: height / (1 + 2 * MARGIN) };
  }

  at(u: number, v: number): Point {
    return atOf(this.rect, this.camera.turned, u, v);
  }

  part(part: Part): Rect {
    return partOf(this.rect, this.camera.turned, part);
  }

  /** Of so many pixels, the share of the sheet's height or width. */
  down(pixels: number): number {
    return pixels / this.size.height;
  }

  across(pixels: number): number {
    return pixels / this.size.width;
  }

  /** How much of the step from one share of the computation to another is done. */
  done(from: number, to: number): number {
    return fade(this.share, from, to);
  }

  add(mark: Mark): void {
    if (mark.alpha === undefined || mark.alpha > 0.01) this.marks.push(mark);
  }

  text(id: string, [u, v]: Point, text: string, look: Partial<Omit<Text, "kind" | "at" | "text">> = {}): void {
    this.add({ kind: "text", id: `${this.id}.${id}`, at: this.at(u, v), text, size: "small", align: "left", ink: "soft", ...look } as Text);
  }

  box(id: string, part: Part, ink: Ink, look: Look & Pick<Box, "outlined" | "corner"> = {}): void {
    this.add({ kind: "box", id: `${this.id}.${id}`, rect: this.part(part), ink, ...plain(look) } as Box);
  }

  line(id: string, points: readonly Point[], ink: Ink = "line", width = 1, alpha = 1): void {
    this.add({ kind: "line", id: `${this.id}.${id}`, points: points.map(([u, v]) => this.at(u, v)), ink, width, alpha });
  }

  /** Numbers as cells, in reading order; in several rows where one has no room. */
  strip(id: string, part: Part, values: Float32Array, { scale = "signed", limit, rows, cell, ...look }: StripLook = {}): void {
    const wide = (part.u1 - part.u0) * this.size.width;
    const lines = rows ?? rowsFor(values.length, wide / LEAST);
    const columns = values.length / lines;
    this.add({
      kind: "cells", id: `${this.id}.${id}`, rect: this.part(part), rows: lines, columns, values, scale, limit: limit ?? endOf(values),
      ...plain({ ...look, ...(cell && { cell: (row: number, column: number) => cell(0, row * columns + column) }) }),
    } as Cells);
  }

  /** A strip with its name above it at the left, its value at the right. */
  captioned(id: string, { u0, v0, u1, v1 }: Part, values: Float32Array, { label, labelInk = "soft", value, ...look }: RowLook): void {
    const wide = (u1 - u0) * this.size.width;
    const named = { alpha: look.alpha ?? 1, shift: [0, LABEL / 2] as Point };
    const room = value ? wide - widthOf(value, "small", true) - 8 : wide;
    this.text(`${id}.label`, [u0, v1], label, { ...named, ink: labelInk, most: room });
    if (value) this.text(`${id}.value`, [u1, v1], value, { ...named, align: "right", mono: true, ink: "ink" });
    this.strip(id, { u0, u1, v0, v1: Math.max(v1 - this.down(LABEL), v0 + 0.3 * (v1 - v0)) }, values, look);
  }

  /** A strip over the sheet's width with its name and its value. */
  row(id: string, [v0, v1]: readonly [number, number], values: Float32Array, { label, labelInk = "soft", value, ...look }: RowLook): void {
    if (this.isNarrow) return this.captioned(id, { u0: 0, u1: 1, v0, v1 }, values, { label, labelInk, value, ...look });
    const middle = (v0 + v1) / 2;
    const named = { alpha: look.alpha ?? 1, size: "normal" } as const;
    this.text(`${id}.label`, [COLUMNS.label, middle], label, { ...named, ink: labelInk, most: (COLUMNS.strip - 0.01) * this.size.width });
    this.strip(id, { u0: COLUMNS.strip, u1: value ? COLUMNS.value - 0.015 : 1, v0, v1 }, values, look);
    if (value) this.text(`${id}.value`, [COLUMNS.value, middle], value, { ...named, mono: true, ink: "ink", most: (1 - COLUMNS.value) * this.size.width });
  }

  /** A matrix that can be entered: a frame with its name and size. */
  matrix(id: string, part: Part, name: string, size: string, enter: Mark["enter"], alpha = 1): void {
    this.box(id, part, "soft", { outlined: true, corner: 4, alpha, enter, says: { name: `matrix ${name}`, value: size, unit: "outputs × inputs" } });
    const [u, v] = [(part.u0 + part.u1) / 2, (part.v0 + part.v1) / 2];
    const wide = (part.u1 - part.u0) * this.size.width - 8;
    const both = `${name}  ${size}`;
    this.text(`${id}.name`, [u, v], widthOf(both, "normal") < wide ? both : name, { size: "normal", align: "center", ink: "ink", most: wide, alpha });
  }

  /** An arrow upwards or to the side, as two lines. */
  arrow(id: string, from: Point, to: Point, alpha = 1): void {
    const [du, dv] = [to[0] - from[0], to[1] - from[1]];
    const [x, y] = [du * this.size.width, dv * this.size.height];
    const long = Math.hypot(x, y) || 1;
    const [ex, ey] = [x / long, y / long];
    const tip = (side: number): Point => [to[0] + this.across(-6 * ex + side * 4 * ey), to[1] + this.down(-6 * ey - side * 4 * ex)];
    this.line(id, [from, to], "soft", 1.2, alpha);
    this.line(`${id}.tip`, [tip(1), to, tip(-1)], "soft", 1.2, alpha);
  }

  /** How many letters of a size have room in a share of the width. */
  room(share: number, size: Text["size"] = "small"): number {
    return Math.floor((share * this.size.width) / (0.58 * SIZES[size]));
  }
}

const ends = new WeakMap<Float32Array, number>();

/** Where the colours of numbers end; found once. */
function endOf(values: Float32Array): number {
  const found = ends.get(values) ?? limitOf(values).limit;
  ends.set(values, found);
  return found;
}

/** Without what is undefined: marks have no such fields. */
function plain<T extends object>(look: T): Partial<T> {
  return Object.fromEntries(Object.entries(look).filter(([, value]) => value !== undefined)) as Partial<T>;
}

/** The least number of equal rows of which each has at most so many cells. */
export function rowsFor(count: number, most: number): number {
  for (let rows = 1; rows < count; rows++) if (count % rows === 0 && count / rows <= most) return rows;
  return Math.max(1, count);
}
