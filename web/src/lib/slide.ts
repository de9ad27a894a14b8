/**
 * What a view shows as one drawing: its boxes, letters, curves and canvases, where the browser has put them. The drawing is painted as PNG at the
 * width of a slide, or written as SVG with plain shapes, which presentations read. Controls are left out.
 */

import { large } from "./large.svelte";

export const SLIDE = 1920; // px of a PNG's width
const EDGE = 24; // px around what is shown
const SKIPPED = "script, style, title, desc, nav, input, select, textarea, progress, summary, details:not([open]), .hidden, .steps, .keys, .save, .deeper, .shared, .controls, .task, .bar[role], [role=tooltip], label, a:not(p:not(.story) *, li *, td *)";
const LISTS = "ol, ul, table, svg, p"; // buttons that are data, or words, stand in one

type Matrix = readonly [number, number, number, number, number, number];

interface Look {
  readonly fill?: string | undefined;
  readonly stroke?: string | undefined;
  readonly width: number;
  readonly dash: string;
  readonly alpha: number;
  readonly matrix: Matrix;
}

type Mark =
  | ({ readonly kind: "path"; readonly d: string } & Look)
  | ({ readonly kind: "text"; readonly text: string; readonly x: number; readonly y: number; readonly size: number; readonly weight: string; readonly spacing: string; readonly style: string; readonly family: string } & Look)
  | ({ readonly kind: "image"; readonly canvas: HTMLCanvasElement; readonly x: number; readonly y: number; readonly wide: number; readonly high: number } & Look);

export interface Drawing {
  readonly width: number;
  readonly height: number;
  /** Where what is shown begins. */
  readonly top: number;
  readonly paper: string;
  readonly marks: readonly Mark[];
}

const isSeen = (color: string): boolean => color !== "none" && !/^(transparent|rgba\(.*, 0\)|url\(.*)$/.test(color);
const seen = (color: string): string | undefined => (isSeen(color) ? color : undefined);

/** A rectangle with round corners. */
function rounded(x: number, y: number, wide: number, high: number, radius: number): string {
  const r = Math.min(radius, wide / 2, high / 2);
  if (r <= 0) return `M${x} ${y}h${wide}v${high}h${-wide}z`;
  const turn = (dx: number, dy: number): string => `a${r} ${r} 0 0 1 ${dx} ${dy}`;
  return `M${x + r} ${y}h${wide - 2 * r}${turn(r, r)}v${high - 2 * r}${turn(-r, r)}h${2 * r - wide}${turn(-r, -r)}v${2 * r - high}${turn(r, -r)}z`;
}

/** The outline of an SVG shape, in its own coordinates; none of what has no shape. */
function outlineOf(shape: SVGElement): string {
  const of = (name: string): number => (shape as unknown as Record<string, SVGAnimatedLength>)[name]?.baseVal.value ?? 0;
  const ellipse = (rx: number, ry: number): string => `M${of("cx") - rx} ${of("cy")}a${rx} ${ry} 0 1 0 ${2 * rx} 0a${rx} ${ry} 0 1 0 ${-2 * rx} 0z`;
  switch (shape.localName) {
    case "path": return shape.getAttribute("d") ?? "";
    case "rect": return rounded(of("x"), of("y"), of("width"), of("height"), of("rx"));
    case "line": return `M${of("x1")} ${of("y1")}L${of("x2")} ${of("y2")}`;
    case "circle": return ellipse(of("r"), of("r"));
    case "ellipse": return ellipse(of("rx"), of("ry"));
    case "polyline":
    case "polygon": return `M${(shape.getAttribute("points") ?? "").trim().replace(/\s+/g, "L")}${shape.localName === "polygon" ? "z" : ""}`;
    default: return "";
  }
}

/** Draws an element as it stands on the screen. */
class Walker {
  readonly marks: Mark[] = [];
  readonly #box: DOMRect;
  readonly #ink: string;
  readonly #measure = new OffscreenCanvas(1, 1).getContext("2d") as OffscreenCanvasRenderingContext2D;
  bottom = 0;
  top = Infinity;

  constructor(readonly root: Element) {
    this.#box = root.getBoundingClientRect();
    this.#ink = getComputedStyle(root).color;
  }

  walk(node: Node, alpha: number, clip: DOMRect): void {
    if (node instanceof Text) return this.#text(node, alpha, clip);
    if (!(node instanceof Element) || node.matches(SKIPPED) || (node.localName === "button" && !node.closest(LISTS))) return;
    const look = getComputedStyle(node);
    const shown = alpha * Number(look.opacity);
    if (look.display === "none" || look.visibility !== "visible" || shown === 0) return;
    const rect = node.getBoundingClientRect();
    if (node instanceof SVGElement) this.#shape(node, look, shown);
    else if (meets(rect, clip)) this.#box_(node, look, shown, rect);
    const isClipped = look.overflowX !== "visible" && !(node instanceof SVGElement);
    const inside = isClipped ? common(clip, rect) : clip;
    for (const child of node.childNodes) this.walk(child, shown, inside);
  }

  #move(x: number, y: number): [number, number] {
    return [x - this.#box.left + EDGE, y - this.#box.top + EDGE];
  }

  #put(mark: Mark, top: number, bottom: number): void {
    this.marks.push(mark);
    this.top = Math.min(this.top, top);
    this.bottom = Math.max(this.bottom, bottom);
  }

  /** The background and the borders of a box, or what is painted on a canvas. */
  #box_(node: Element, look: CSSStyleDeclaration, alpha: number, rect: DOMRect): void {
    const [x, y] = this.#move(rect.left, rect.top);
    const plain = { matrix: [1, 0, 0, 1, 0, 0] as Matrix, dash: "", alpha };
    if (node instanceof HTMLCanvasElement && node.width && node.height) {
      return this.#put({ kind: "image", canvas: node, x, y, wide: rect.width, high: rect.height, width: 0, ...plain }, y, y + rect.height);
    }
    const sides = (["Top", "Right", "Bottom", "Left"] as const).map((side) => ({ width: look[`border${side}Style`] === "none" ? 0 : parseFloat(look[`border${side}Width`]) * large.zoom, color: look[`border${side}Color`] }));
    const [top, right, bottom, left] = sides as [(typeof sides)[0], (typeof sides)[0], (typeof sides)[0], (typeof sides)[0]];
    const isFramed = sides.every(({ width, color }) => width > 0 && color === top.color);
    const fill = seen(look.backgroundColor);
    const radius = (parseFloat(look.borderTopLeftRadius) || 0) * large.zoom;
    if (fill || isFramed) {
      this.#put({ kind: "path", d: rounded(x, y, rect.width, rect.height, radius), fill, stroke: isFramed ? seen(top.color) : undefined, width: top.width, ...plain }, y, y + rect.height);
    }
    if (isFramed) return;
    const [x1, y1] = [x + rect.width, y + rect.height];
    const lines = [[top, x, y, x1, y], [right, x1, y, x1, y1], [bottom, x, y1, x1, y1], [left, x, y, x, y1]] as const;
    for (const [{ width, color }, ax, ay, bx, by] of lines) {
      if (width > 0 && isSeen(color)) this.#put({ kind: "path", d: `M${ax} ${ay}L${bx} ${by}`, stroke: color, width, ...plain }, ay, by);
    }
  }

  /** A shape of SVG, or letters in one. */
  #shape(node: SVGElement, look: CSSStyleDeclaration, alpha: number): void {
    const at = node instanceof SVGGraphicsElement ? node.getScreenCTM() : null;
    if (!at) return;
    const [e, f] = this.#move(at.e, at.f);
    const drawn: Look = {
      fill: seen(look.fill), stroke: seen(look.stroke), width: parseFloat(look.strokeWidth) || 1, dash: look.strokeDasharray === "none" ? "" : look.strokeDasharray.replaceAll("px", ""),
      alpha: alpha * (Number(look.fillOpacity) || 1), matrix: [at.a, at.b, at.c, at.d, e, f],
    };
    if (node instanceof SVGTextContentElement) return this.#letters(node, look, drawn);
    const d = outlineOf(node);
    if (!d || (!drawn.fill && !drawn.stroke)) return;
    this.#put({ kind: "path", d, ...drawn, fill: node.localName === "line" ? undefined : drawn.fill }, ...this.#tall(node));
  }

  #tall(node: Element): [number, number] {
    const { top, bottom } = node.getBoundingClientRect();
    return [this.#move(0, top)[1], this.#move(0, bottom)[1]];
  }

  #letters(node: SVGTextContentElement, look: CSSStyleDeclaration, drawn: Look): void {
    const text = [...node.childNodes].filter((one) => one instanceof Text).map((one) => one.textContent ?? "").join("").trim();
    if (!text || !node.getNumberOfChars()) return;
    const before = node.localName === "tspan" ? charsBefore(node) : 0;
    const owner = node.localName === "tspan" ? (node.closest("text") as SVGTextContentElement) : node;
    const { x, y } = owner.getStartPositionOfChar(Math.min(before, owner.getNumberOfChars() - 1));
    this.#put({ kind: "text", text, x, y, ...fontOf(look, 1), ...drawn, stroke: undefined }, ...this.#tall(node));
  }

  /** Letters of the page, word by word where a line ends. */
  #text(node: Text, alpha: number, clip: DOMRect): void {
    const parent = node.parentElement;
    if (!parent || parent instanceof SVGElement || !node.data.trim()) return;
    const look = getComputedStyle(parent);
    const font = fontOf(look, large.zoom);
    this.#measure.font = `${font.style} ${font.weight} ${font.size}px ${font.family}`;
    const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = this.#measure.measureText("x");
    const range = document.createRange();
    let line: { text: string; x: number; y: number } | undefined;
    const end = (): void => {
      if (line) this.#put({ kind: "text", ...line, ...font, fill: isSeen(look.color) ? look.color : this.#ink, width: 0, dash: "", alpha, matrix: [1, 0, 0, 1, 0, 0] }, line.y - up, line.y + down);
      line = undefined;
    };
    const isKept = look.whiteSpaceCollapse === "preserve" || look.whiteSpace.startsWith("pre");
    for (const { index, 0: word } of node.data.matchAll(/\S+\s*|\s+/g)) {
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      const rect = range.getClientRects()[0];
      if (!rect || !meets(rect, clip)) continue;
      const [x, top] = this.#move(rect.left, rect.top);
      const y = top + (rect.height * up) / (up + down);
      const shown = isKept ? word.replaceAll("\n", "") : word.replace(/\s+/g, " ");
      if (line && Math.abs(line.y - y) < 2) line.text += shown;
      else {
        end();
        line = { text: shown.trimStart(), x, y };
      }
    }
    end();
  }
}

function fontOf(look: CSSStyleDeclaration, zoom: number): { size: number; weight: string; spacing: string; style: string; family: string } {
  return { size: parseFloat(look.fontSize) * zoom, weight: look.fontWeight, spacing: `${(parseFloat(look.letterSpacing) || 0) * zoom}px`, style: look.fontStyle, family: look.fontFamily };
}

function charsBefore(tspan: Element): number {
  let count = 0;
  for (let one = tspan.previousSibling; one; one = one.previousSibling) count += one.textContent?.length ?? 0;
  return count;
}

const meets = (a: DOMRect, b: DOMRect): boolean => a.right > b.left && a.left < b.right && a.bottom > b.top && a.top < b.bottom;

function common(a: DOMRect, b: DOMRect): DOMRect {
  const [left, top] = [Math.max(a.left, b.left), Math.max(a.top, b.top)];
  return new DOMRect(left, top, Math.max(0, Math.min(a.right, b.right) - left), Math.max(0, Math.min(a.bottom, b.bottom) - top));
}

/** What an element shows. */
export function drawingOf(root: Element): Drawing {
  const walker = new Walker(root);
  walker.walk(root, 1, new DOMRect(-1e6, -1e6, 2e6, 2e6));
  const { width } = root.getBoundingClientRect();
  const top = Math.min(walker.top, walker.bottom) - EDGE;
  return { width: width + 2 * EDGE, top, height: walker.bottom + EDGE - top, paper: getComputedStyle(document.documentElement).backgroundColor, marks: walker.marks };
}

/** Paint a drawing at the width of a slide. */
export function painted({ width, height, top, paper, marks }: Drawing): Promise<Blob | null> {
  const scale = SLIDE / width;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: SLIDE, height: Math.ceil(height * scale) });
  const context = canvas.getContext("2d") as CanvasRenderingContext2D;
  context.fillStyle = paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (const mark of marks) {
    context.setTransform(scale, 0, 0, scale, 0, -top * scale);
    context.transform(...(mark.matrix as [number, number, number, number, number, number]));
    context.globalAlpha = mark.alpha;
    if (mark.fill) context.fillStyle = mark.fill;
    if (mark.kind === "image") context.drawImage(mark.canvas, mark.x, mark.y, mark.wide, mark.high);
    else if (mark.kind === "text") {
      context.letterSpacing = mark.spacing;
      context.font = `${mark.style} ${mark.weight} ${mark.size}px ${mark.family}`;
      context.fillText(mark.text, mark.x, mark.y);
    } else {
      const path = new Path2D(mark.d);
      if (mark.fill) context.fill(path);
      if (!mark.stroke) continue;
      context.strokeStyle = mark.stroke;
      context.lineWidth = mark.width;
      context.setLineDash(mark.dash.split(/[ ,]+/).filter(Boolean).map(Number));
      context.stroke(path);
    }
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

const escaped = (text: string): string => text.replace(/[\p{Cc}\p{Cs}\ufffe\uffff]/gu, " ").replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);
const tag = (name: string, fields: Readonly<Record<string, string | number | undefined>>, inside = ""): string =>
  `<${name}${Object.entries(fields).map(([key, value]) => (value === undefined || value === "" ? "" : ` ${key}="${escaped(String(value))}"`)).join("")}>${escaped(inside)}</${name}>`;

/** Write a drawing as SVG that stands alone. */
export function written({ width, height, top, paper, marks }: Drawing): Blob {
  const lines = marks.map((mark) => {
    const matrix = mark.matrix.join() === "1,0,0,1,0,0" ? "" : `matrix(${mark.matrix.join(" ")})`;
    const look = { transform: matrix, opacity: mark.alpha === 1 ? undefined : mark.alpha };
    if (mark.kind === "image") return tag("image", { ...look, x: mark.x, y: mark.y, width: mark.wide, height: mark.high, href: mark.canvas.toDataURL() });
    if (mark.kind === "text") return tag("text", { ...look, x: mark.x, y: mark.y, fill: mark.fill, "font-family": mark.family, "font-size": mark.size, "font-weight": mark.weight, "font-style": mark.style, "letter-spacing": mark.spacing === "0px" ? undefined : mark.spacing, "xml:space": "preserve" }, mark.text);
    return tag("path", { ...look, d: mark.d, fill: mark.fill ?? "none", ...(mark.stroke && { stroke: mark.stroke, "stroke-width": mark.width, "stroke-dasharray": mark.dash }) });
  });
  const [wide, high] = [Math.ceil(width), Math.ceil(height)];
  const back = tag("rect", { y: top, width: "100%", height: "100%", fill: paper });
  return new Blob([`<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${high}" viewBox="0 ${top} ${wide} ${high}">\n${[back, ...lines].join("\n")}\n</svg>\n`], { type: "image/svg+xml" });
}

/** Numbers as CSV (RFC 4180), a number in each line: its name, its places in lists, and the value. A text that a spreadsheet would compute begins with an apostrophe. */
export function csv(value: unknown): Blob {
  const rows: { name: string; at: number[]; value: unknown }[] = [];
  const put = (name: string, at: number[], one: unknown): void => {
    if (ArrayBuffer.isView(one) || Array.isArray(one)) Array.from(one as ArrayLike<unknown>).forEach((each, i) => put(name, [...at, i], each));
    else if (one !== null && typeof one === "object") Object.entries(one).forEach(([key, each]) => put(name ? `${name}.${key}` : key, at, each));
    else rows.push({ name, at, value: one });
  };
  put("", [], value);
  const depth = rows.reduce((most, { at }) => Math.max(most, at.length), 0);
  const cell = (one: unknown): string => {
    if (one === undefined || one === null || (typeof one === "number" && !Number.isFinite(one))) return "";
    const text = typeof one === "string" && /^[=+\-@\t\r]/.test(one) ? `'${one}` : String(one);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const places = Array.from({ length: depth }, (_, i) => `index_${i + 1}`);
  const lines = rows.map(({ name, at, value: one }) => [name, ...places.map((_, i) => at[i]), one].map(cell).join(","));
  return new Blob([["name", ...places, "value"].join(","), "\r\n", ...lines.map((line) => `${line}\r\n`)], { type: "text/csv" });
}
