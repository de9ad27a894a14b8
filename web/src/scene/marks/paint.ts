/**
 * Marks to a canvas. Marks of one style are one path, in the world's own units: it is made once for a list of marks, and only moved by the camera.
 * What has a size in pixels (dots, letters, round corners) is placed anew in each frame.
 */

import { color, pixels, table } from "../../lib/colors";
import { sharp } from "../../lib/sharp.svelte";
import { project, scaleOf, type Camera } from "../places/camera";
import { fontOf, inkColor, INKS } from "./look";
import type { Area, Box, Cells, Curve, Dot, Hand, Ink, Line, Mark, Text } from "./marks";
import type { Sheet } from "../scene";

type Pathed = Area | Line | Curve | Box;
type Placed = Dot | Hand | Text | Cells | Box;

/** What is drawn in one go. */
interface Batch {
  readonly kind: Mark["kind"];
  readonly ink: Ink;
  readonly hue: number | undefined;
  readonly alpha: number;
  /** Of a line; 0 is filled. */
  readonly width: number;
  readonly path?: Path2D;
  readonly marks: Placed[];
}

const ALPHAS = { line: 10, other: 20 } as const; // steps that are told apart, so that there are few styles
const WIDTHS = 2; // a pixel
const HAIR = 1;

const made = new WeakMap<readonly Mark[], readonly Batch[]>();
const pictures = new WeakMap<Float32Array, { dark: boolean; limit: number; canvas: OffscreenCanvas }>();
const cutTexts = new Map<string, string>();

export class Painter {
  readonly #context: CanvasRenderingContext2D;

  constructor(readonly canvas: HTMLCanvasElement) {
    this.#context = canvas.getContext("2d") as CanvasRenderingContext2D;
  }

  /** Paint what stands; an empty list leaves nothing. */
  paint(sheets: readonly Sheet[], camera: Camera, dark: boolean): void {
    const { canvas } = this;
    const context = this.#context;
    const { value: scale } = sharp;
    const [width, height] = [Math.round(camera.size.width * scale), Math.round(camera.size.height * scale)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, camera.size.width, camera.size.height);
    context.lineJoin = "round";
    const toScreen = matrixOf(camera);
    for (const { marks, strength } of sheets) for (const batch of batchesOf(marks)) draw(context, batch, strength, camera, toScreen, dark);
    context.globalAlpha = 1;
  }
}

/** The camera as an affine map. */
function matrixOf({ rect, size, turned }: Camera): DOMMatrix {
  const scale = scaleOf({ rect, size, turned });
  return turned
    ? new DOMMatrix([0, scale.x, scale.y, 0, -rect.y0 * scale.y, -rect.x0 * scale.x])
    : new DOMMatrix([scale.x, 0, 0, -scale.y, -rect.x0 * scale.x, size.height + rect.y0 * scale.y]);
}

const isPathed = (mark: Mark): mark is Pathed => mark.kind === "area" || mark.kind === "line" || mark.kind === "curve" || (mark.kind === "box" && !mark.corner);

function widthOfLine(mark: Mark): number {
  if (mark.kind === "line" || mark.kind === "curve") return Math.max(1, Math.round(mark.width * WIDTHS)) / WIDTHS;
  if (mark.kind === "hand") return mark.width ?? HAIR;
  return (mark.kind === "box" || mark.kind === "dot") && mark.outlined ? HAIR : 0;
}

/** Marks in their order, those of one style together as long as only marks of their kind lie between them. */
function batchesOf(marks: readonly Mark[]): readonly Batch[] {
  const known = made.get(marks);
  if (known) return known;
  const batches: Batch[] = [];
  let open = new Map<string, Batch>();
  let kind = "";
  for (const mark of marks) {
    if (mark.kind !== kind) open = new Map();
    kind = mark.kind;
    const ink = "ink" in mark ? mark.ink : "ink";
    const width = widthOfLine(mark);
    const alphas = width ? ALPHAS.line : ALPHAS.other;
    const alpha = Math.ceil((mark.alpha ?? 1) * alphas) / alphas;
    const pathed = isPathed(mark);
    const style = `${ink} ${mark.hue} ${alpha} ${width} ${pathed}`;
    let batch = open.get(style);
    if (!batch) {
      batch = { kind: mark.kind, ink, hue: mark.hue, alpha, width, ...(pathed ? { path: new Path2D() } : {}), marks: [] };
      open.set(style, batch);
      batches.push(batch);
    }
    if (pathed) trace(batch.path as Path2D, mark);
    else batch.marks.push(mark as Placed);
  }
  made.set(marks, batches);
  return batches;
}

function trace(path: Path2D, mark: Pathed): void {
  if (mark.kind === "box") {
    const { x0, y0, x1, y1 } = mark.rect;
    path.rect(x0, y0, x1 - x0, y1 - y0);
  } else if (mark.kind === "curve") {
    const [a, b, c, d] = mark.points;
    path.moveTo(a[0], a[1]);
    path.bezierCurveTo(b[0], b[1], c[0], c[1], d[0], d[1]);
  } else {
    mark.points.forEach(([x, y], i) => (i ? path.lineTo(x, y) : path.moveTo(x, y)));
    if (mark.kind === "area") path.closePath();
  }
}

function draw(context: CanvasRenderingContext2D, batch: Batch, strength: number, camera: Camera, toScreen: DOMMatrix, dark: boolean): void {
  const { path, width } = batch;
  context.globalAlpha = batch.alpha * strength;
  context.fillStyle = context.strokeStyle = inkColor(batch, dark);
  context.lineWidth = width || HAIR;
  if (path && width) {
    const moved = new Path2D(); // a line's width is in pixels, so it is the path that is moved
    moved.addPath(path, toScreen);
    context.stroke(moved);
    return;
  }
  if (path) {
    const before = context.getTransform();
    context.transform(toScreen.a, toScreen.b, toScreen.c, toScreen.d, toScreen.e, toScreen.f);
    context.fill(path);
    context.setTransform(before);
    return;
  }
  if (batch.kind === "text") texts(context, batch.marks as Text[], camera, dark);
  else if (batch.kind === "cells") for (const mark of batch.marks) cells(context, mark as Cells, camera, dark);
  else {
    context.beginPath();
    for (const mark of batch.marks) place(context, mark as Dot | Hand | Box, camera);
    if (width) context.stroke();
    else context.fill();
  }
}

function place(context: CanvasRenderingContext2D, mark: Dot | Hand | Box, camera: Camera): void {
  if (mark.kind === "box") {
    const { left, top, width, height } = boxOf(mark.rect, camera);
    context.roundRect(left, top, width, height, Math.min(mark.corner ?? 0, width / 2, height / 2));
    return;
  }
  const [x, y] = project(camera, mark.at);
  if (mark.kind === "dot") {
    context.moveTo(x + mark.radius, y);
    context.arc(x, y, mark.radius, 0, 7);
    return;
  }
  const [dx, dy] = [mark.length * Math.cos(mark.angle), -mark.length * Math.sin(mark.angle)];
  const [tipX, tipY] = [x + dx, y + dy];
  context.moveTo(x, y);
  context.lineTo(tipX, tipY);
  for (const side of [-0.45, 0.45]) {
    const back = mark.angle + Math.PI + side;
    const long = Math.min(6, 0.3 * mark.length);
    context.moveTo(tipX, tipY);
    context.lineTo(tipX + long * Math.cos(back), tipY - long * Math.sin(back));
  }
}

/** A rectangle of the world in pixels. */
export function boxOf(rect: Box["rect"], camera: Camera): { left: number; top: number; width: number; height: number } {
  const [a, b] = [project(camera, [rect.x0, rect.y0]), project(camera, [rect.x1, rect.y1])];
  return { left: Math.min(a[0], b[0]), top: Math.min(a[1], b[1]), width: Math.abs(a[0] - b[0]), height: Math.abs(a[1] - b[1]) };
}

function texts(context: CanvasRenderingContext2D, marks: readonly Text[], camera: Camera, dark: boolean): void {
  const { width, height } = camera.size;
  context.textBaseline = "middle";
  const ink = context.fillStyle;
  for (const mark of marks) {
    const [x, y] = placeOf(mark, camera);
    if (x < -300 || y < -20 || x > width + 300 || y > height + 20) continue;
    const font = fontOf(mark);
    if (context.font !== font) context.font = font;
    context.textAlign = mark.align;
    const shown = cut(context, mark.text, mark.most, font);
    if (mark.ink !== "panel") {
      context.strokeStyle = INKS[dark ? "dark" : "light"].paper;
      context.lineWidth = 3;
      context.strokeText(shown, x, y);
    }
    context.fillStyle = ink;
    context.fillText(shown, x, y);
  }
}

export function placeOf({ at, shift }: Text, camera: Camera): readonly [number, number] {
  const [x, y] = project(camera, at);
  return [x + (shift?.[0] ?? 0), y + (shift?.[1] ?? 0)];
}

/** A text within its room; what is cut off is an ellipsis. */
function cut(context: CanvasRenderingContext2D, text: string, most: number | undefined, font: string): string {
  if (most === undefined) return text;
  const key = `${Math.round(most)} ${font} ${text}`;
  const known = cutTexts.get(key);
  if (known !== undefined) return known;
  let letters = [...text];
  let found = text;
  while (letters.length > 1 && context.measureText(found).width > most) {
    letters = letters.slice(0, -1);
    found = `${letters.join("")}…`;
  }
  if (cutTexts.size > 5000) cutTexts.clear();
  cutTexts.set(key, found);
  return found;
}

function cells(context: CanvasRenderingContext2D, mark: Cells, camera: Camera, dark: boolean): void {
  const { left, top, width, height } = boxOf(mark.rect, camera);
  if (left > camera.size.width || top > camera.size.height || left + width < 0 || top + height < 0) return;
  context.imageSmoothingEnabled = false;
  context.drawImage(pictureOf(mark, dark), left, top, width, height);
}

/** A pixel a cell; what is no number is left out. */
function pictureOf({ values, rows, columns, scale, limit }: Cells, dark: boolean): OffscreenCanvas {
  const known = pictures.get(values);
  if (known?.dark === dark && known.limit === limit) return known.canvas;
  const shades = pixels(table(scale, dark));
  const image = new ImageData(columns, rows);
  const found = pixels(image.data);
  for (let i = 0; i < rows * columns; i++) {
    const value = values[i] as number;
    if (!Number.isFinite(value)) continue;
    const share = scale === "share" ? value / limit : 0.5 + value / limit / 2;
    found[i] = shades[Math.round(255 * Math.min(1, Math.max(0, share)))] as number;
  }
  const canvas = new OffscreenCanvas(columns, rows);
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  pictures.set(values, { dark, limit, canvas });
  return canvas;
}

/** The colour of a cell, as it is painted. */
export const cellColor = (mark: Pick<Cells, "scale" | "limit">, value: number, dark: boolean): readonly [number, number, number] =>
  color(mark.scale, dark, mark.scale === "share" ? value / mark.limit : 0.5 + value / mark.limit / 2);
